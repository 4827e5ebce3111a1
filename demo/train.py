"""Trains the demo's video model by flow matching: ``.venv/bin/python demo train --out FOLDER``.

Writes the files that the demo loads, a curve of the loss, and sample frames. Everything follows
from the seed and the options. The committed model's stand in its training.json; one NVIDIA H200
trained it, before shapes came first.
"""

import argparse
import json
import math
import time
from itertools import count
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file

from . import host
from .clips import draw, random_scenes
from .codec import LATENT_SCALE, Codec, fit
from .video_model import FRAMES, build, euler, shifted, velocity
from .words import NOTHING, Vocabulary, parse, vocabulary

WARM_UP = 200  # steps
COOL_DOWN = 0.4  # share of the steps, over which the learning rate falls to nothing
TIMED = (20, 60)  # steps by which --seconds finds out how many there is time for
BETAS = (0.9, 0.99)
EMA = 0.999
SAID_NOTHING = 0.1  # share of clips that are shown without their words
# Shapes are learnt from single frames, of which many more are seen in the same time; then motion.
IMAGES_FIRST = 0.5  # share of the steps
IMAGE_EVERY = 5  # afterwards one step in so many is of single frames
IMAGES = 16  # as many as clips in a step
SAMPLES = (
    "red circle left over blue plain",
    "yellow star spinning over purple checks",
    "green square down over orange dots",
    "white two up over red stripes",
    "cyan triangle circling over green plain",
    "orange seven growing over blue checks",
    "purple cross right over yellow stripes",
    "blue moon still over white dots",
)
CHECKPOINT = "demo_hunyuan_video.safetensors"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    started = time.monotonic()
    host.import_comfy(cpu=options.device == "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(min(16, torch.get_num_threads()))
    options.out.mkdir(parents=True, exist_ok=True)
    codec, words = fit(), vocabulary()
    save_file(codec._asdict(), options.out / "codec.safetensors")
    save_file(words._asdict(), options.out / "vocabulary.safetensors")
    Trainer(options, codec, words, started).run()
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo train", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=30000)
    parser.add_argument(
        "--batch", type=int, default=32, help="clips; or IMAGES times single frames"
    )
    parser.add_argument("--size", type=int, default=128, help="pixels, both ways")
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    # Where a shape is and what its outline will be is decided above 0.9: cells resemble each other,
    # so that many tell it through much noise. A shift of 3 puts few levels there, which taught
    # textures and edges but no whole shapes.
    parser.add_argument(
        "--shift", type=float, default=7.0, help="of the noise levels, in training and in sampling"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=256, help="channels, 128 a head")
    parser.add_argument("--blocks", type=int, nargs=2, default=(1, 3), help="double and single")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="no more steps than fit into so long; training.json says how many that were",
    )
    return parser.parse_args(arguments)


class Trainer:
    """One run of training: the model, its running average, and what has been seen of the loss."""

    def __init__(
        self, options: argparse.Namespace, codec: Codec, words: Vocabulary, started: float
    ) -> None:
        self.options, self.started = options, started
        self.device = torch.device(options.device)
        self.codec = Codec(*(x.to(self.device) for x in codec))
        self.words = Vocabulary(*(x.to(self.device) for x in words))
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        depth, singles = options.blocks
        widths = {
            "hidden_size": options.hidden,
            "num_heads": options.hidden // 128,
            "depth": depth,
            "depth_single_blocks": singles,
        }
        self.model = build(self.device, options.seed, **widths)
        self.velocity = torch.compile(velocity, dynamic=False) if options.compile else velocity
        self.parameters = dict(self.model.named_parameters())
        self.average = {key: x.detach().clone() for key, x in self.parameters.items()}
        self.optimiser = torch.optim.AdamW(
            self.parameters.values(), lr=options.rate, betas=BETAS, weight_decay=0.01, fused=True
        )
        self.steps = options.steps
        self.cost = {"clips": 0.0, "images": 0.0}  # seconds, of the steps in TIMED
        self.curve: list[dict[str, float]] = []

    def run(self) -> None:
        print(f"{sum(x.numel() for x in self.parameters.values()):,} parameters", flush=True)
        saved = time.monotonic()
        losses = {"clips": [], "images": []}
        for step in count():
            if step == TIMED[1]:
                self._fit_into_time(step)
            if step >= self.steps or self._seconds() > self.options.seconds:
                self.steps = step  # as many as there were
                break
            kind = self._kind(step)
            timed = TIMED[0] <= step < TIMED[1]
            before = self._finished() if timed else 0.0
            losses[kind].append(self._step(step, 1 if kind == "images" else FRAMES))
            if timed:
                self.cost[kind] += self._finished() - before
            if step % 100 == 99 or (step < 20 and step % 5 == 4):
                self._note(step + 1, losses)
                losses = {"clips": [], "images": []}
            if time.monotonic() - saved > self.options.save_every:
                self.save()
                saved = time.monotonic()
        self.save()
        self.show()

    def _kind(self, step: int) -> str:
        if step < TIMED[1]:  # both in turn, to time both
            return "clips" if step % 2 else "images"
        if step < IMAGES_FIRST * self.steps or step % IMAGE_EVERY == 0:
            return "images"
        return "clips"

    def _fit_into_time(self, step: int) -> None:
        """Sets the number of all steps by what the steps in TIMED took."""
        half = (TIMED[1] - TIMED[0]) / 2
        images, clips = self.cost["images"] / half, self.cost["clips"] / half
        print(f"a step: images {1e3 * images:.1f} ms, clips {1e3 * clips:.1f} ms", flush=True)
        later = clips + (images - clips) / IMAGE_EVERY
        each = IMAGES_FIRST * images + (1 - IMAGES_FIRST) * later
        left = 0.97 * max(0.0, self.options.seconds - self._seconds()) / each
        self.steps = int(min(self.steps, step + left))
        print(f"{self.steps} steps", flush=True)

    def _finished(self) -> float:
        """Seconds until now, all work done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self._seconds()

    def _seconds(self) -> float:
        return time.monotonic() - self.started

    def _note(self, step: int, losses: dict[str, list[torch.Tensor]]) -> None:
        means = {kind: torch.stack(seen).mean().item() for kind, seen in losses.items() if seen}
        entry = {"step": step, **{kind: round(mean, 5) for kind, mean in means.items()}}
        self.curve.append(entry)
        if step % 500 == 0 or step <= 300:
            memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0
            print(entry, f"{self._seconds():.1f} s, {memory:.1f} GiB", flush=True)

    def _batch(self, frames: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Model-scale latents, context and pooled vectors of new random scenes."""
        count = self.options.batch if frames > 1 else self.options.batch * IMAGES
        scenes = random_scenes(count, self.generator)
        if frames > 1:
            times = torch.linspace(0, 1, frames, device=self.device).expand(count, frames)
        else:
            times = torch.rand(count, 1, generator=self.generator, device=self.device)
        latents = self.codec.encode(draw(scenes, times, self.options.size)) * LATENT_SCALE
        silent = torch.rand(count, 1, generator=self.generator, device=self.device) < SAID_NOTHING
        return latents, *self.words.embed(scenes.words.masked_fill(silent, NOTHING))

    def _step(self, step: int, frames: int) -> torch.Tensor:
        with torch.no_grad():
            latents, context, pooled = self._batch(frames)
            noise = self._noise(latents.shape)
            evenly = torch.rand(len(latents), generator=self.generator, device=self.device)
            sigma = shifted(evenly, self.options.shift)
            x = torch.lerp(latents, noise, sigma[:, None, None, None, None])
        self._set_rate(step)
        with self._autocast():
            found = self.velocity(self.model, x, sigma, context, pooled)
        loss = (found.float() - (noise - latents)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            weight = 1 - min(EMA, (1 + step) / (10 + step))
            torch._foreach_lerp_(
                list(self.average.values()), list(self.parameters.values()), weight
            )
        return loss.detach()

    def _set_rate(self, step: int) -> None:
        left = (self.steps - step) / (COOL_DOWN * self.steps)
        share = min(1.0, (step + 1) / WARM_UP, left)
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.rate * share

    def _noise(self, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16)

    def save(self) -> None:
        """The averaged weights in FP16, under the names that the host knows, and the curve."""
        weights = {key: x.half().contiguous().cpu() for key, x in self.average.items()}
        origin = {"licence": "Apache-2.0", "made_by": "demo/train.py"}
        partial = self.options.out / "partial.safetensors"
        save_file(weights, partial, metadata=origin)
        partial.replace(self.options.out / CHECKPOINT)
        options = {key: str(value) for key, value in vars(self.options).items() if key != "out"}
        record = {
            "options": options,
            "steps": self.steps,
            "seconds": round(self._seconds(), 1),
            "torch": torch.__version__,
            "curve": self.curve,
        }
        (self.options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")

    @torch.no_grad()
    def show(self) -> None:
        """Samples of the averaged model: a row a prompt, and single frames of the same prompts."""
        for key, parameter in self.parameters.items():
            parameter.copy_(self.average[key])
        rows = torch.stack([parse(prompt) for prompt in SAMPLES]).to(self.device)
        context, pooled = self.words.embed(rows)
        cells = self.options.size // 4
        for name, frames in (("clips", FRAMES), ("images", 1)):
            noise = self._noise((len(rows), 16, frames, cells, cells))
            with self._autocast():
                latents = euler(self.model, noise, context, pooled, 20, self.options.shift)
            clips = self.codec.decode(latents / LATENT_SCALE)
            _sheet(clips).save(self.options.out / f"{name}.png")
            print(f"{name}: latents' deviation {latents.std():.3f}", flush=True)


def _sheet(clips: torch.Tensor) -> Image.Image:
    """[B, 3, T, H, W] as a picture: a clip a row, frames from left to right."""
    picture = clips.permute(0, 3, 2, 4, 1).flatten(2, 3).flatten(0, 1)
    return Image.fromarray((picture * 255).round().byte().cpu().numpy())
