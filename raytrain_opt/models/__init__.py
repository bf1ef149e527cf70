"""Networks by name: the package's small-image models, torchvision's, and the user's function.

Start with `factory`: `check_model` finds wrong names and arguments without building anything,
`build_model` constructs the network. `networks` has the built-in ones. May import config, errors
and random_state; torchvision is imported when a name is not built in.
"""

from raytrain_opt.models.factory import build_model, check_model, check_output
from raytrain_opt.models.networks import model_names, torchvision_names

__all__ = ["build_model", "check_model", "check_output", "model_names", "torchvision_names"]
