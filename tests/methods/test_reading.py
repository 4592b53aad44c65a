"""Readings of the paper that its text leaves open; their losses are compared with the twin in test_duplex.py."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from duplex.errors import UsageError
from duplex.methods.codebook import Codebook, TrainedCodebook
from duplex.methods.duplex import DuplexOptions as Options
from tests.methods import twin
from tests.methods.world import every_row, features, scores_of, small_labels, small_method, step_of

LABELS = small_labels()
SEEN, EVERY = LABELS.pairs["train"], np.arange(LABELS.size)


def method_of(reading: dict[str, Any], **row: Any) -> Any:
    return small_method(Options.from_dict({"width": 5, "adapter": "none", "reading": reading, **row}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"graph": False, "reading": {"edges": "label"}}, "reading: edges only changes the local graph"),
        ({"messages": ["state"], "reading": {"fusion_rank": 2}}, "need counterfactual in messages"),
        ({"messages": ["counterfactual"], "reading": {"edges": "label"}}, "needs state or object in messages"),
        ({"fusion": "additive", "reading": {"fusion_rank": 2}}, "leave reading.fusion_rank out"),
        ({"reading": {"counterfactuals": "labels", "diagonal": False}}, "leave diagonal out"),
        ({"reading": {"softmax": "all"}, "semantic_negatives": "target"}, "leave semantic_negatives out"),
        ({"reading": {"codebook": "trained"}, "losses": ["semantic"]}, "needs visual in losses"),
        ({"reading": {"edge": "label"}}, "reading.edge: unknown key; known: unseen, softmax, edges"),
        ({"reading": {"unseen": "batch"}, "unseen_rows": "random"}, "leave one of them out"),
        ({"reading": {"unseen": "empty"}, "graph": False}, "without prototypes unless graph is true"),
        ({"reading": {"factors": "labels"}, "messages": ["counterfactual"]}, "reading.factors needs state or object"),
        ({"reading": "litteral"}, "reading: is 'litteral'; expected literal"),
        ({"reading": {"preset": "ours"}}, "reading: is 'ours'; expected literal"),
        ({"reading": {"edges": "labels"}}, "reading.edges: input should be 'posterior' or 'label'"),
    ],
)
def test_readings_that_contradict_other_options_are_refused(row, message):
    with pytest.raises(UsageError, match=message):
        Options.from_dict(row)


def test_posteriors_over_all_compositions_are_those_of_the_formulas():
    """Eq. 4, 19 and 21 by the letter: the candidates' probabilities sum to less than one."""
    method, z = method_of({"softmax": "all"}).eval(), features(5, 2)
    columns = LABELS.candidates("closed", "test")
    assert method.paths.negatives.tolist() == EVERY.tolist()
    with torch.no_grad():
        zc, t = method.paths.adapt(z), method.paths.prompts.encode(EVERY)
        z_s, z_o = method.paths.factors(zc)
        p_s = twin.posteriors(z_s, t.states, method.paths.scale)
        p_o = twin.posteriors(z_o, t.objects, method.paths.scale)
        visual = twin.posteriors(zc, every_row(method), method.paths.scale)
        semantic = twin.posteriors(zc, t.compositions, method.paths.scale)
    factors = p_s[:, LABELS.state_of(columns)] * p_o[:, LABELS.object_of(columns)]
    expected = visual[:, columns] + semantic[:, columns] + factors
    torch.testing.assert_close(scores_of(method, columns, z).double(), expected, rtol=1e-6, atol=1e-7)
    assert method.portable(columns) is None
    assert method.portable(EVERY) is not None
    whole = scores_of(method, EVERY, z)
    torch.testing.assert_close(scores_of(method_of({}).eval(), EVERY, z), whole)  # the open world compares with all


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("unseen", ["compose", "random", "empty"])
def test_a_trained_codebook_begins_with_the_prototypes_of_one_that_is_not(unseen, anchored):
    z, labels = twin.unit(features(40, 1)), torch.as_tensor(np.resize(SEEN, 40))
    books: list[Any] = []
    for make in (lambda book: book, lambda book: TrainedCodebook(LABELS, book, anchored=anchored)):
        torch.manual_seed(3)
        books.append(make(Codebook(LABELS, 8, unseen=unseen, random_seen=False).double()).double())
        books[-1].start(z, labels, seen=True)
    buffer, trained = books
    torch.testing.assert_close(trained.prototypes(EVERY), buffer.prototypes(EVERY), rtol=1e-7, atol=1e-7)
    assert (trained.initial is not None) == anchored
    assert trained.is_empty(EVERY).tolist() == buffer.is_empty(EVERY).tolist()
    new, rows = EVERY[[3, 8]], twin.unit(features(2, 4))
    trained.write_back(new, rows)
    torch.testing.assert_close(trained.prototypes(new), rows, rtol=1e-7, atol=1e-7)
    assert not trained.is_empty(new).any()
    rest = np.setdiff1d(EVERY, new)
    torch.testing.assert_close(trained.prototypes(rest), buffer.prototypes(rest), rtol=1e-7, atol=1e-7)


def test_gradients_change_every_prototype_and_refinement_writes_its_own():
    method, batch = method_of({"codebook": "trained"}, losses=["visual"]), torch.as_tensor(SEEN[:4])
    optimiser = torch.optim.SGD(method.parameters(), lr=0.1)
    before = method.codebook.H.detach().clone()
    step = step_of(method, features(4, 5), batch)
    step.total.backward()
    method.after_batch()
    written = method.codebook.H.detach().clone()
    optimiser.step()
    torch.testing.assert_close(written[step.refinement.compositions], step.refinement.rows.detach())
    assert (written != method.codebook.H).any(1)[LABELS.candidates("closed", "train")].all()
    outside = np.setdiff1d(EVERY, LABELS.candidates("closed", "train"))
    assert torch.equal(method.codebook.H[outside], before[outside]), "a pair of no split has no gradient"


def test_finite_differences_of_trained_prototypes_and_of_a_fusion_of_low_rank():
    """d L_c^h / dH, dM_s and dM_o, through the refinement."""
    method = method_of({"codebook": "trained", "fusion_rank": 3}, losses=["visual"])
    z, batch = features(4, 5), torch.as_tensor(SEEN[:4])
    names = ["codebook.H", *(f"fusion.{part}.{i}.weight" for part in ("state", "object") for i in (0, 1))]
    values = tuple(method.get_parameter(name).detach().clone().requires_grad_() for name in names)
    shared = method.shared()

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.method = method

        def forward(self) -> torch.Tensor:
            return step_of(self.method, z, batch, shared).losses["visual"]

    def loss(*values: torch.Tensor) -> torch.Tensor:
        parameters = {f"method.{name}": value for name, value in zip(names, values, strict=True)}
        return torch.func.functional_call(Loss(), parameters, ())

    assert gradcheck(loss, values, eps=1e-6, atol=1e-6)


def test_detached_anchors_get_no_gradient_through_the_weights_of_messages():
    for anchors, reaches in (("attached", True), ("detached", False)):
        method = method_of({"anchors": anchors}, losses=["visual"])
        step_of(method, features(3, 5), torch.as_tensor(SEEN[:3])).total.backward()
        gradient = method.paths.prompts.learned_rows.grad
        assert (gradient is not None and bool(gradient.abs().sum() > 0)) == reaches
        assert method.paths.factors.state.first.weight.grad.abs().sum() > 0
