"""The demo's trained model among the host's own nodes: from five words to a moving picture."""

import io

import pytest
from PIL import Image
from sageattention3.demo import video
from sageattention3.demo.clips import SIZE
from sageattention3.demo.sampling import EVERYTHING
from sageattention3.demo.server import PromptError
from sageattention3.demo.train import CHECKPOINT
from sageattention3.demo.video import SHIFT

pytestmark = [pytest.mark.server, pytest.mark.host]
FRAMES = 3


def graph(prompt):
    def node(class_type, **inputs):
        return {"class_type": class_type, "inputs": inputs}

    return {
        "1": node("UNETLoader", unet_name=CHECKPOINT, weight_dtype="default"),
        "2": node("ModelSamplingSD3", model=["1", 0], shift=SHIFT),
        "3": node("SageAttention3Patch", model=["2", 0], **EVERYTHING),
        "4": node("SageAttention3DemoPrompt", prompt=prompt),
        "5": node("SageAttention3DemoPrompt", prompt=""),
        "6": node(
            "EmptyHunyuanLatentVideo",
            width=2 * SIZE,
            height=2 * SIZE,
            length=4 * (FRAMES - 1) + 1,
            batch_size=1,
        ),
        "7": node(
            "KSampler",
            model=["3", 0],
            seed=0,
            steps=2,
            cfg=1.0,
            sampler_name="euler",
            scheduler="simple",
            positive=["4", 0],
            negative=["5", 0],
            latent_image=["6", 0],
            denoise=1.0,
        ),
        "8": node("SageAttention3Report", samples=["7", 0], model=["3", 0]),
        "9": node("SageAttention3DemoDecode", samples=["8", 0]),
        "10": node(
            "SaveAnimatedWEBP",
            images=["9", 0],
            filename_prefix="demo_clip",
            fps=7.0,
            lossless=True,
            quality=80,
            method="fastest",
        ),
    }


def test_a_graph_makes_a_moving_picture_of_five_words(server):
    video.checkpoint()
    outputs = server.run(graph("red star left over blue dots"))["outputs"]
    precisions = {row["precision"] for row in outputs["8"]["ledger"][0]}
    assert precisions == {"int8"}
    [saved] = outputs["10"]["images"]
    with Image.open(io.BytesIO(server.view(saved))) as clip:
        assert clip.n_frames == FRAMES
        assert clip.size == (SIZE, SIZE)


def test_an_unknown_word_is_refused_before_anything_runs(server):
    video.checkpoint()
    with pytest.raises(PromptError, match="'horse' is no shape that this model knows"):
        server.run(graph("red horse left over blue dots"))
