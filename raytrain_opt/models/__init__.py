"""Networks by name: our small-image models, torchvision's classification models, the user's.

Cheap to import: torch is imported when a model is built, torchvision when a name is not ours.
"""

from raytrain_opt.models.build import build_model
from raytrain_opt.models.check import check_model
from raytrain_opt.models.output import check_output
from raytrain_opt.models.registry import model_names, torchvision_names

__all__ = ["build_model", "check_model", "check_output", "model_names", "torchvision_names"]
