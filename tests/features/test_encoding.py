"""Batches through an encoder, on the CPU and on a pretended device."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from duplex.encoders.base import Encoder, load_encoder
from duplex.errors import DuplexError
from duplex.features.encode import LaunchedBatch, WantedOutputs, decoding_workers, encode_batches, pad_batches
from duplex.features.file import ALL_ZERO, ENCODED, FIRST_BAD, NOT_FINITE
from tests.features.conftest import Wrapped
from tests.pretended import Pretended

SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:131] . DefaultCPUAllocator: can't allocate memory: you tried to"),
    MemoryError(),
]


NONE = torch.zeros(8, 32, dtype=torch.uint8)  # contents of a batch of eight


@pytest.mark.parametrize("patches", [False, True])
def test_another_device_gives_the_same_rows(pretended: Pretended, encoder_name: str, patches: bool) -> None:
    torch.manual_seed(0)
    here = load_encoder(encoder_name, towers="image")
    stream = [(8 * n, torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8), statuses(), NONE) for n in range(3)]
    expected = list(encode_batches(here, stream, WantedOutputs(patches)))
    there = load_encoder(encoder_name, towers="image", device=pretended.name)
    pretended.reset()
    found = list(encode_batches(there, stream, WantedOutputs(patches)))
    for (row, its, values), (other, theirs, rows) in zip(expected, found, strict=True):
        assert row == other
        assert (its == theirs).all()
        assert values.keys() == rows.keys() == ({"cls", "contents", *(["patch"] if patches else [])})
        assert all(np.allclose(values[name], rows[name], atol=2e-3) and not rows[name][2].any() for name in values)
    copies = {"copy to the device": 2, "copy to the CPU": 3 if patches else 2}
    waits = {kind: sum(n for (what, _), n in pretended.synchronisations.items() if what == kind) for kind in copies}
    assert waits == {kind: 3 * count for kind, count in copies.items()}
    assert pretended.synchronisations.total() == sum(waits.values())


def statuses() -> torch.Tensor:
    found = torch.full((8,), ENCODED, dtype=torch.uint8)
    found[2] = FIRST_BAD
    return found


@pytest.mark.parametrize("name", ["cls", "patch"])
def test_rows_that_are_not_finite_or_zero_in_float16_are_bad_and_zero(encoder, name: str) -> None:
    def encode_patches(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cls, patch = (x.clone() for x in encoder.encode_patches(pixels))
        {"cls": cls[4, :1], "patch": patch[4, 1, :1]}[name].fill_(float("nan"))
        patch[2] = float("inf")  # of an image that is bad already: its own reason stays
        cls[5], cls[6] = 1e-9, 0
        patch[6, 0, 0] = float("nan")  # the more specific reason
        return cls, patch

    pixels = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    broken = cast(Encoder, Wrapped(encoder, None, encode_patches))
    ((_, found, values),) = encode_batches(broken, [(0, pixels, statuses(), NONE)], WantedOutputs(patches=True))
    wanted = statuses().numpy()
    wanted[4:7] = NOT_FINITE, ALL_ZERO, NOT_FINITE
    assert (found == wanted).all()
    for each in ("cls", "patch"):
        assert not values[each][[2, 4, 5, 6]].any() and values[each][[0, 1, 3]].any()


def test_features_with_gradients_are_stored_without_them(run, encoder) -> None:
    weight = torch.ones(1, requires_grad=True)
    assert run(encoder=Wrapped(encoder, lambda pixels: weight * encoder.encode_images(pixels).clone())).bad == []


@pytest.mark.parametrize("shortage", SHORTAGES, ids=lambda error: type(error).__name__)
def test_a_shortage_of_memory_names_the_option_to_change(run, encoder, shortage: Exception) -> None:
    def fail(pixels: torch.Tensor) -> torch.Tensor:
        raise shortage

    with pytest.raises(DuplexError, match=r"not enough memory to encode 8 images at once.*smaller batch"):
        run(encoder=Wrapped(encoder, fail))
    shortage = RuntimeError("expected scalar type Half")  # another error passes through
    with pytest.raises(RuntimeError, match="scalar type"):
        run(encoder=Wrapped(encoder, fail))


def test_a_run_on_the_cpu_creates_no_cuda_context(run, encoder_name, tmp_path, monkeypatch) -> None:
    """On a machine with a GPU: a context would take half a gigabyte of its memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("a CUDA context"))
    cpu = load_encoder(encoder_name, device="cpu")
    cpu.text.encode_plain([[0, 1]], torch.zeros(2, cpu.text.width))
    assert run(encoder=cpu, num_workers=1).rows == 40


def test_the_device_is_waited_for_before_results_are_read() -> None:
    """A copy from a GPU is complete once its event has happened, and not before."""
    marks = torch.zeros(2, dtype=torch.uint8)
    done = SimpleNamespace(synchronize=lambda: marks.fill_(ENCODED))
    launched = LaunchedBatch(7, marks, {"cls": torch.ones(2, 3).half()}, done)  # type: ignore[arg-type]
    start, found, values = launched.result()
    assert (start, found.tolist(), values["cls"].sum()) == (7, [ENCODED] * 2, 6)
    assert LaunchedBatch(0, marks, {}, None).result()[1].tolist() == [ENCODED] * 2


@pytest.mark.parametrize(("cores", "workers"), [({0}, 0), ({0, 1, 5}, 2)])
def test_automatic_workers_leave_a_core_to_the_encoder(monkeypatch, cores: set[int], workers: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
    assert (decoding_workers("auto"), decoding_workers(3)) == (workers, 3)


def test_batches_are_filled_up_with_black_images_to_a_multiple() -> None:
    batch = torch.ones(3, 1, 2, 2), torch.zeros(3, dtype=torch.uint8), torch.ones(3, 32, dtype=torch.uint8)
    ((start, pixels, statuses, contents),) = pad_batches([(5, *batch)], 4)
    assert (start, len(pixels), len(statuses), contents.sum(1).tolist()) == (5, 4, 4, [32, 32, 32, 0])
    assert pixels[3].sum() == 0 and pixels[:3].all()
    assert statuses[3] == ENCODED
    whole = torch.ones(4, 1, 2, 2), torch.zeros(4, dtype=torch.uint8), torch.zeros(4, 32, dtype=torch.uint8)
    ((_, *same),) = pad_batches([(0, *whole)], 4)
    assert all(mine is given for mine, given in zip(same, whole, strict=True)), "not copied"


@pytest.mark.parametrize(
    ("record", "finetuned", "expected"),
    [({"block_inputs": "2"}, True, WantedOutputs(True, 2)), ({"block_inputs": "2"}, False, WantedOutputs(True)),
     ({"block_inputs": "0", "pixels": "x"}, True, WantedOutputs(True, 0, True)),
     ({"block_inputs": "0", "pixels": "x"}, False, WantedOutputs(True))],
)  # fmt: skip
def test_a_model_reads_block_inputs_or_pixels_only_if_blocks_are_finetuned(record, finetuned, expected):
    assert WantedOutputs.of_record(record, patches=True, finetuned=finetuned) == expected
