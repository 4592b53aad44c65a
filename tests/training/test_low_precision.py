"""`training.precision: bf16` trains both towers near fp32, with float32 weights; SDPA equals attention written out."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from duplex.encoders.image_blocks import last_blocks
from duplex.encoders.libraries import open_clip
from duplex.encoders.text import ClipTextTower
from duplex.errors import UsageError
from duplex.methods.base import Batch, MethodContext
from duplex.methods.blocks import FinetunedBlocks, finetuned_blocks_factory
from duplex.methods.registry import make_method, parse_options
from duplex.options import FinetuneOptions, TrainingOptions
from duplex.testing import small_labels
from duplex.training.loop import make_optimiser, optimiser_step
from duplex.training.run import train_run
from tests.encoders.test_image_blocks import TRANSFORMERS, run_tower, tower
from tests.encoders.towers import CONTEXT, END, START, VOCABULARY, FakeTokenizer

VISION = {"image_size": 32, "layers": 3, "width": 64, "patch_size": 8, "head_width": 16}
TEXT = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 32, "heads": 2, "layers": 3}
IMAGES = 24
SETTINGS = TrainingOptions(learning_rate=1e-3, batch_size=IMAGES, epochs=1, optimiser="adamw")
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cso_paper": ("prompts", {"adapter": "none", "vocabulary": "fixed"}, {"adapter": "parallel"}),
    "duplex_paper": (
        "duplex",
        {"adapter": "none", "vocabulary": "fixed", "reading": "literal"},
        {"adapter": "parallel"},
    ),
    "full": ("prompts", {}, {"adapter": "full", "text": "full"}),
    "lora": ("prompts", {}, {"adapter": "lora", "text": "lora"}),
    "caila": ("caila", {"adapter": "blocks"}, {"adapter": "concepts", "text": "concepts"}),
}


class Words(FakeTokenizer):
    """Each word has a token of its own, or nearly."""

    def encode(self, text: str) -> list[int]:
        return [1 + sum(map(ord, word)) % (START - 1) for word in text.split()]


def random_model() -> Any:
    """A small CLIP whose features differ from prompt to prompt, unlike those of open_clip's initial weights."""
    model = open_clip.CLIP(32, VISION, TEXT, quick_gelu=True).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.add_(0.1 * torch.randn_like(weight))
    return model


def started(name: str, precision: str) -> tuple[Any, Batch]:
    """A method whose small random towers compute in `precision`, after its start, and images."""
    kind, options, tuned = METHODS[name]
    torch.manual_seed(0)
    model = random_model()
    encoder = SimpleNamespace(visual=model.visual, name="small")
    finetune = FinetuneOptions("all", **tuned)
    blocks = partial(FinetunedBlocks, last_blocks(encoder, 3), finetune, (17, 64), precision)
    text = ClipTextTower(model, Words([START], [END], 0), precision=precision)
    labels = small_labels()
    context = MethodContext(labels, {"cls": (32,), "block_inputs": (17, 64)}, text, finetuned_blocks=blocks)
    random = torch.Generator().manual_seed(1)
    inputs = {"cls": torch.randn(IMAGES, 32, generator=random)}
    inputs["block_inputs"] = torch.randn(IMAGES, 17, 64, generator=random)
    seen = torch.from_numpy(labels.pairs["train"])
    batch = Batch(inputs, seen[torch.arange(IMAGES) % len(seen)])
    method = make_method(kind, parse_options(kind, options), context)
    with torch.no_grad():
        for weight in method.parameters():  # adapters whose last layer is zero would hide the others' gradients
            weight.add_(0.02 * torch.randn(weight.shape, generator=random))
    method.eval().start(batch)
    return method, batch


def losses_and_gradient(name: str, precision: str) -> tuple[dict[str, float], Tensor]:
    method, batch = started(name, precision)  # in evaluation mode: without dropout
    losses = method.losses(batch, method.shared())
    assert all(value.dtype == torch.float32 for value in losses.values())
    torch.stack(list(losses.values())).sum().backward()
    grads = [weight.grad for weight in method.parameters() if weight.grad is not None]
    assert all(weight.dtype == torch.float32 for weight in method.parameters())
    return {key: float(value.detach()) for key, value in losses.items()}, torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("name", METHODS)
def test_losses_and_gradients_are_near_those_of_float32(name: str) -> None:
    exact, direction = losses_and_gradient(name, "fp32")
    rounded, found = losses_and_gradient(name, "bf16")
    assert found.isfinite().all() and not torch.equal(found, direction)
    assert F.cosine_similarity(found, direction, dim=0) > 0.99
    for key, value in exact.items():
        assert rounded[key] == pytest.approx(value, rel=0.02)


@pytest.mark.parametrize("name", ["full", "duplex_paper"])
def test_weights_moments_and_scores_are_float32_and_repeatable(name: str) -> None:
    scores = []
    for _ in range(2):
        method, batch = started(name, "bf16")
        settings = replace(SETTINGS, precision="bf16")
        optimiser = make_optimiser(method, settings)
        for _ in range(3):
            torch.manual_seed(0)
            optimiser_step(method.train(), batch, torch.arange(IMAGES), settings, optimiser)
        values = [value for state in optimiser.state.values() for value in state.values()]
        assert values and all(value.dtype == torch.float32 for value in values)
        assert all(value.dtype == torch.float32 for value in method.state_dict().values() if value.is_floating_point())
        scores.append(method.eval().scorer(method.labels.candidates("closed", "test"))(batch.inputs))
    assert scores[0].dtype == torch.float32 and torch.equal(*scores)


@pytest.mark.parametrize(("cache", "text", "used"), [("fp32", "bf16", "bf16"), ("tf32", "fp32", "tf32")])
def test_the_precision_of_training_is_that_of_both_towers(cache: str, text: str, used: str) -> None:
    record = {"name": "tiny", "tag": "", "block_inputs": "1", "precision": cache, "text_precision": text}
    assert finetuned_blocks_factory(record, FinetuneOptions(1), "cpu")().precision == used


def test_a_gpu_without_bf16_is_refused_by_the_name_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old One")
    spec: Any = SimpleNamespace(training=replace(SETTINGS, precision="bf16"))
    nothing: Any = None
    with pytest.raises(UsageError, match=r"training\.precision is bf16.*Old One.*set it to fp32"):
        train_run(spec, nothing, 0, torch.device("cuda"), nothing)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_optimiser_is_fused_on_a_gpu_alone(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    kind = {"adam": "Adam", "adamw": "AdamW"}[name]

    def record(groups: Any, **options: Any) -> Any:
        made.append(options)
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    monkeypatch.setattr(torch.optim, kind, record)
    settings = replace(SETTINGS, optimiser=name)
    for device in ("cuda", "cpu"):
        weight = SimpleNamespace(device=torch.device(device))
        method: Any = SimpleNamespace(groups=lambda weight=weight: [{"params": [weight]}], modules=list)
        make_optimiser(method, settings)
    assert [options.get("fused") for options in made] == [True, None]


ATTENDING = (*TRANSFORMERS, "OpenAI ResNet", "SigLIP 2", "FastViT")


@pytest.fixture
def written_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Replaces torch's attention by its formula from the first call on; a call returns how often it was used."""
    used = []

    def attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, p: float = 0.0, is_causal: bool = False, **more: Any
    ) -> Tensor:
        """softmax(q k' / sqrt(e) + mask) v, for each image and head."""
        assert not (is_causal or more.get("dropout_p", p) or more.get("is_causal"))
        used.append(q.shape)
        mask = more.get("attn_mask", mask)
        scores = torch.einsum("...qe,...ke->...qk", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return torch.einsum("...qk,...ke->...qe", scores.softmax(-1), v)

    def count() -> int:
        monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
        return len(used)

    yield count


@pytest.mark.parametrize("name", ATTENDING)
def test_attention_of_every_image_tower_is_torchs_and_equals_the_formula(name: str, written_out: Any) -> None:
    encoder, images = tower(name)
    _, inputs = run_tower(encoder, images, 2)
    cut = last_blocks(encoder, 2)
    x = inputs.requires_grad_()
    fast = cut(x)
    (gradient,) = torch.autograd.grad(fast.square().sum(), x)
    assert written_out() == 0
    slow = cut(x)
    (expected,) = torch.autograd.grad(slow.square().sum(), x)
    assert written_out() >= (2 if name in TRANSFORMERS else 1)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-3)


def test_attention_of_separate_prompts_is_torchs_and_equals_the_formula(written_out: Any) -> None:
    text = ClipTextTower(random_model(), FakeTokenizer([START], [END], 0))
    prompts = [[START, 1, 2, 3, END], [START, 4, END]]
    lexicon = text.vocabulary.table.clone().requires_grad_()
    fast = text.encode_plain(prompts, lexicon)
    assert written_out() == 0
    torch.testing.assert_close(text.encode_plain(prompts, lexicon), fast, atol=1e-5, rtol=1e-4)
    assert written_out() == TEXT["layers"]
