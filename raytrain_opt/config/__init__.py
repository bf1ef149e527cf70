"""The job file: from YAML text to a frozen `Job`, and every error in it at once.

Start reading at `schema` (`Job`, the root of all sections); `data`, `learning_rate`, `batch_size`
and `updates` hold its larger sections, `section` what every section is made of, `rules` what
sections forbid each other. `load` reads job files, with `--set`, writes them, by `yaml_loader`,
and finds the functions that they name; `error_messages` translates pydantic's errors.

May import `errors` only, of this package. No torch, no Ray.
"""
