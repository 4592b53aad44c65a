"""TOMCAT against a plain loop written from its formulas, and what an adapted method may not change."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from duplex.errors import UsageError
from duplex.methods import tomcat
from duplex.methods.base import AdapterInputs, PrimitiveVectors
from duplex.methods.compcos import CompCos, CompCosOptions
from duplex.methods.prompt_method import PromptOptions
from duplex.methods.tomcat import Tomcat, TomcatOptions
from tests.methods.world import batch_of, features, small_context, small_method

OPTIONS = TomcatOptions(learning_rate=1e-2, alpha=1.25, beta=3.0, theta=1.5, contrast=2.5, weight_decay=1e-2, queue=2)
CSP = PromptOptions(paths="composition", adapter="none", losses=("semantic",), inference=("semantic",))


def adapted_run(method, feasible=None, dtype=torch.float64):
    """A run with exact scores, which those of a method in float32 are not."""
    candidates = method.eval().labels.candidates("closed", "test")
    labels = np.resize(method.labels.pairs["train"], 40)
    terms = method.score_terms(candidates)
    scorer = torch.no_grad()(lambda inputs: torch.stack([term for _, term in terms(inputs)]).sum(0).to(dtype))
    mask = np.ones(len(candidates), dtype=bool) if feasible is None else feasible
    return AdapterInputs(method, candidates, mask, batch_of(features(40, 1), labels), scorer)


def stream_of(z, batch=1):
    return ({"cls": part} for part in z.split(batch))


def plain_scores(run, z, batch=1):
    return torch.cat([run.scorer(inputs) for inputs in stream_of(z, batch)])


def adapted_scores(run, options, z, batch=1):
    return torch.cat(list(Tomcat(run, options).scores(stream_of(z, batch))))


def plain_loop(t, z, kappa, options, queues=None):
    """The paper's loop, a class at a time: probabilities [40, C] before each step."""
    classes = range(len(t))
    dt, dv = (torch.zeros_like(t, requires_grad=True) for _ in range(2))
    optimiser = torch.optim.AdamW([dt, dv], lr=options.learning_rate, weight_decay=options.weight_decay, eps=1e-3)
    queues = queues or {}
    met, recorded = set(), []
    for x in z:
        moved_t = [normalize(t[c] + torch.sigmoid(-options.theta * (x @ t[c])) * dt[c], dim=0) for c in classes]
        s = torch.stack([kappa * (x @ each) for each in moved_t])
        p = s.detach().softmax(0)
        entropy, best = float(-(p * p.log()).sum()), int(s.argmax())
        queue = queues.setdefault(best, [])
        if len(queue) < options.queue:
            queue.append((entropy, x))
        elif entropy < max(h for h, _ in queue):
            queue.remove(max(queue, key=lambda entry: entry[0]))
            queue.append((entropy, x))
        met.add(best)
        logits, moved_v = list(s), {}
        for c in queues:
            v = torch.stack([each for _, each in queues[c]]).mean(0)
            moved_v[c] = normalize(v + torch.sigmoid(-options.theta * (x @ v)) * dv[c], dim=0)
            logits[c] = s[c] + options.alpha * torch.exp(-options.beta * (1 - x @ moved_v[c]))
        final = torch.stack(logits)
        recorded.append(final.detach().softmax(0))
        p = final.softmax(0)
        order = sorted(met)
        matrix = kappa * torch.stack([torch.stack([moved_v[i] @ moved_t[j] for j in order]) for i in order])
        own = torch.arange(len(order))
        contrast = (cross_entropy(matrix, own) + cross_entropy(matrix.T, own)) / 2
        optimiser.zero_grad()
        (-(p * p.log()).sum() + options.contrast * contrast).backward()
        optimiser.step()
    return torch.stack(recorded)


@pytest.mark.parametrize("score", ["probability", "logit"])
def test_scores_are_those_of_a_plain_loop(score):
    method = small_method(replace(CSP, score=score))
    run, z = adapted_run(method), normalize(features(40, 5), dim=1)
    kappa = math.exp(method.context.tower.logit_scale)
    expected = plain_loop(method.paths.semantic(run.candidates), z, kappa, OPTIONS)
    found, plain = map(method.probabilities, (adapted_scores(run, OPTIONS, z), plain_scores(run, z)))
    assert (found - expected).abs().max() < 1e-8
    assert (found - plain).abs().max() > 0.01  # it does adapt


def test_a_warm_start_begins_with_means_of_training_features():
    method = small_method(CSP)
    run, options = adapted_run(method), TomcatOptions(**{**OPTIONS.to_dict(), "warm": True})
    made, train = Tomcat(run, options), normalize(run.train.cls, dim=1)
    numbers = run.train.compositions
    for place, c in enumerate(run.candidates.tolist()):
        own = train[numbers == c].mean(0)
        if c not in numbers:
            own = train[numbers // 3 == c // 3].mean(0) + train[numbers % 3 == c % 3].mean(0) - train.mean(0)
        assert torch.allclose(made.v[place], normalize(own, dim=0), atol=1e-6)
    queues = {place: [(math.inf, v.clone())] for place, v in enumerate(made.v)}
    z, kappa = normalize(features(40, 5), dim=1), math.exp(method.context.tower.logit_scale)
    expected = plain_loop(made.t, z, kappa, options, queues)
    assert (torch.cat(list(made.scores(stream_of(z)))) - expected).abs().max() < 1e-8


@pytest.mark.parametrize("options", [CSP, PromptOptions()], ids=["csp", "cso"])
def test_without_learning_the_scores_are_those_of_the_method(options):
    run, z = adapted_run(small_method(options)), features(9, 3)
    still = TomcatOptions(learning_rate=0.0, alpha=0.0, warm=True)
    assert torch.equal(adapted_scores(run, still, z, 2), plain_scores(run, z, 2))


@pytest.mark.parametrize("batch", [1, 12])
def test_sums_of_posteriors_keep_their_total(batch):
    run, z = adapted_run(small_method(PromptOptions())), features(12, 4)
    found, plain = adapted_scores(run, OPTIONS, z, batch), plain_scores(run, z)
    assert plain.sum(1).min() > 1 and (found - plain).abs().max() > 0.01
    torch.testing.assert_close(found.sum(1), plain.sum(1), rtol=1e-6, atol=0)


def test_infeasible_candidates_take_no_part():
    method = small_method(CSP)
    mask = np.array([True] * 6 + [False] + [True] * (len(method.labels.candidates("closed", "test")) - 7))
    run, z = adapted_run(method, mask), features(12, 4)
    found = adapted_scores(run, OPTIONS, z)
    assert torch.equal(found[:, 6], plain_scores(run, z)[:, 6])
    others = torch.from_numpy(mask)
    scorer = torch.no_grad()(lambda inputs: run.scorer(inputs)[:, others])
    alone = replace(run, candidates=run.candidates[mask], feasible=mask[mask], scorer=scorer)
    assert torch.allclose(found[:, others], adapted_scores(alone, OPTIONS, z), atol=1e-12)


def test_of_many_candidates_the_best_of_each_image_move(monkeypatch):
    run, z = adapted_run(small_method(CSP)), features(40, 4)
    whole = adapted_scores(run, OPTIONS, z)
    monkeypatch.setattr(tomcat, "MOST", len(run.candidates) - 1)
    monkeypatch.setattr(tomcat, "TOP", len(run.candidates) - 1)
    adapted_scores(run, OPTIONS, z)
    monkeypatch.setattr(tomcat, "TOP", 2)
    for options in (OPTIONS, replace(OPTIONS, warm=True)):
        made = Tomcat(run, options)
        assert not len(made.moving)
        scores = torch.cat(list(made.scores(stream_of(z))))
        assert 2 < len(made.moving) < len(run.candidates)
        assert scores.isfinite().all() and (scores - whole).abs().max() < 1


def test_a_method_without_prompts_is_refused():
    words = torch.eye(4)
    method = CompCos(small_context(words=PrimitiveVectors(words, words[:3])), CompCosOptions())
    with pytest.raises(UsageError, match="CompCos has none"):
        Tomcat(replace(adapted_run(small_method(CSP)), method=method), TomcatOptions())
