"""The job file: from YAML text to a frozen `Job`, and every error in it at once.

Start reading at `schema` (`Job`, the root of all sections); `learning_rate`, `batch_size`,
`updates` and `processes` hold its larger sections, `section` what every section is made of,
`rules` what sections forbid each other. `load` reads job files, with `--set`, and writes them, by
`yaml_loader`; `error_messages` translates pydantic's errors, `functions` finds functions of the
user's own.

May import `errors` only, of this package. No torch, no Ray.
"""
