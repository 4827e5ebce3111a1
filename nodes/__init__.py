"""The nodes of the pack, by the id that workflows store."""

from .benchmark import SageAttention3Benchmark
from .calibrate import SageAttention3Calibrate, SageAttention3CalibrateGuider
from .compare import SageAttention3Compare
from .load_diffusion_model import SageAttention3LoadDiffusionModel
from .patch import SageAttention3Patch
from .profiles import SageAttention3LoadProfile, SageAttention3SaveProfile
from .report import SageAttention3Report

NODE_CLASS_MAPPINGS = {
    node.__name__: node
    for node in (
        SageAttention3Patch,
        SageAttention3LoadDiffusionModel,
        SageAttention3Report,
        SageAttention3Calibrate,
        SageAttention3CalibrateGuider,
        SageAttention3LoadProfile,
        SageAttention3SaveProfile,
        SageAttention3Compare,
        SageAttention3Benchmark,
    )
}
NODE_DISPLAY_NAME_MAPPINGS = {name: node.TITLE for name, node in NODE_CLASS_MAPPINGS.items()}
