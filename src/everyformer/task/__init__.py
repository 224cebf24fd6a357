"""Tasks: data, objective and inference. Importing this package registers the tasks for JSON and the command line."""

from everyformer.task.classify import Classify, Regress
from everyformer.task.control import Control
from everyformer.task.denoise import Denoise
from everyformer.task.image import Image
from everyformer.task.language import Language
from everyformer.task.masked import Masked
from everyformer.task.replaced import Replaced
from everyformer.task.translate import Translate

__all__ = ["Classify", "Control", "Denoise", "Image", "Language", "Masked", "Regress", "Replaced", "Translate"]
