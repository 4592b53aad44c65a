"""Which changes of a line no test notices: `python -m benchmarks.mutants duplex/labels.py --sample 50`, `make mutants`.

Each mutant is one small change of one module, met by the tests that mirror it. A child forked after the heavy imports
runs them with the changed module in memory: no file changes, and a mutant takes a second or two. A mutant that outlives
its tests is a survivor. `docs/tests.md` lists those that no test can notice, each with its reason: where one of them is
drawn it is left out and told of, and so is an entry that is no mutant any more.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib.abc
import importlib.util
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
FIELD = [f"tests/methods/test_{name}.py" for name in ("ranges", "modes", "stored")]  # that meet every kind of method
DEFAULTS = "tests/evaluation/test_defaults.py"
STORED = FIELD[-1]  # and are told how many numbers it keeps
TESTS = {  # module -> what mirrors it
    "duplex/labels.py": ["tests/test_labels.py"],
    "duplex/layers/word_feasibility.py": ["tests/layers/test_word_feasibility.py"],
    "duplex/training/loop.py": ["tests/training/test_loop.py", "tests/test_peak.py"],
    "duplex/training/checkpoint.py": ["tests/training/test_checkpoint.py"],
    "duplex/training/calibration.py": ["tests/training/test_calibration.py"],
    "duplex/training/scoring.py": ["tests/training/test_scoring.py", "tests/training/test_calibration.py"],
    "duplex/training/resume.py": ["tests/training/test_resume.py"],
    "duplex/evaluation/archives.py": ["tests/evaluation/test_archives.py", "tests/hostile/test_score_files.py"],
    "duplex/evaluation/curve.py": [DEFAULTS, "tests/evaluation/test_curve.py"],
    "duplex/evaluation/accumulator.py": [DEFAULTS, "tests/evaluation/test_accumulator.py"],
    "duplex/evaluation/feasibility.py": [DEFAULTS, "tests/evaluation/test_feasibility.py"],
    "duplex/evaluation/groups.py": ["tests/evaluation/test_groups.py"],
    "duplex/evaluation/metrics.py": [DEFAULTS, "tests/evaluation/test_metrics.py", "tests/evaluation/test_curve.py"],
    "duplex/evaluation/topk.py": ["tests/evaluation/test_topk.py"],
    "duplex/evaluation/retrieval.py": ["tests/evaluation/test_retrieval.py"],
    "duplex/evaluation/sampled.py": [DEFAULTS, "tests/evaluation/test_sampled.py"],
    "duplex/evaluation/scores.py": ["tests/evaluation/test_scores.py", "tests/cli/test_score.py"],
    "duplex/evaluation/seeds.py": [DEFAULTS, "tests/evaluation/test_seeds.py"],
    "duplex/evaluation/splits.py": [DEFAULTS, "tests/evaluation/test_splits.py"],
    "duplex/evaluation/uncertainty.py": [DEFAULTS, "tests/evaluation/test_uncertainty.py"],
    "duplex/evaluation/glove.py": ["tests/evaluation/test_glove.py"],
    "duplex/data/split.py": ["tests/data/test_split.py"],
    "duplex/features/augmentation.py": ["tests/features/test_augmentation.py", "tests/features/test_views.py"],
    "duplex/features/decoding.py": ["tests/features/test_decoding.py", "tests/features/test_image_files.py"],
    "duplex/features/eight_bits.py": ["tests/features/test_eight_bits.py"],
    "duplex/features/encoding.py": ["tests/features/test_encoding.py"],
    "duplex/features/examples.py": ["tests/features/test_examples.py"],
    "duplex/features/extraction.py": [f"tests/features/test_{name}.py" for name in ("course", "extraction", "deep")],
    "duplex/features/identity.py": ["tests/features/test_identity.py"],
    "duplex/features/importing.py": ["tests/features/test_importing.py"],
    "duplex/features/inspection.py": ["tests/features/test_inspection.py", "tests/features/test_views.py"],
    "duplex/features/layout.py": ["tests/features/test_layout.py", "tests/features/test_deep.py"],
    "duplex/features/image_files.py": ["tests/features/test_image_files.py"],
    "duplex/features/cache_files.py": ["tests/features/test_tokens.py"],
    "duplex/features/remade.py": ["tests/features/test_held.py"],
    "duplex/features/copy_cache.py": ["tests/features/test_copy_cache.py"],
    "duplex/features/shards.py": ["tests/features/test_shards.py"],
    "duplex/features/store.py": ["tests/features/test_store.py", "tests/features/test_layout.py"],
    "duplex/features/tokens.py": [f"tests/features/test_{name}.py" for name in ("tokens", "eight_bits", "held")],
    "duplex/features/views.py": ["tests/features/test_views.py"],
    "duplex/features/interrupts.py": ["tests/features/test_interrupts.py", "tests/features/test_interruption.py"],
    "duplex/methods/base.py": ["tests/methods/test_base.py", "tests/methods/test_registry.py"],
    "duplex/methods/inspectable.py": ["tests/methods/test_prompts.py", "tests/methods/test_base.py"],
    "duplex/methods/head.py": [f"tests/methods/test_{name}.py" for name in ("head", "cge", "compcos")],
    "duplex/methods/with_finetuning.py": ["tests/methods/test_with_finetuning.py"],
    "duplex/methods/three_paths.py": [
        "tests/methods/test_cds.py", "tests/methods/test_troika.py", "tests/methods/test_ranges.py",
    ],
    "duplex/methods/duplex.py": [
        "tests/methods/test_ranges.py", "tests/methods/test_following.py", "tests/methods/test_readings.py",
        "tests/methods/test_duplex_scores.py", "tests/methods/test_duplex_rows.py", "tests/methods/test_duplex.py",
    ],
    "duplex/layers/additive.py": [f"tests/layers/test_{name}.py" for name in ("additive", "closed_form", "interactions")],
    "duplex/layers/attention.py": ["tests/layers/test_attention.py", "tests/methods/test_troika.py"],
    "duplex/layers/gaussian_prototypes.py": ["tests/layers/test_gaussian_prototypes.py", "tests/layers/test_interactions.py"],
    "duplex/layers/clusters.py": ["tests/methods/test_cluspro.py"],
    "duplex/layers/codebook.py": [
        "tests/layers/test_codebook.py", STORED, "tests/methods/test_following.py", "tests/methods/test_readings.py",
    ],
    "duplex/layers/composition_graph.py": ["tests/methods/test_cge.py", "tests/methods/test_gipcol.py", STORED],
    "duplex/layers/counterfactual.py": ["tests/methods/test_duplex.py", "tests/methods/test_duplex_rows.py"],
    "duplex/layers/covariance.py": ["tests/layers/test_covariance.py"],
    "duplex/layers/draws.py": ["tests/layers/test_codebook.py"],
    "duplex/layers/factors.py": ["tests/layers/test_factors.py", STORED, "tests/methods/test_duplex.py"],
    "duplex/layers/graph.py": ["tests/methods/test_duplex_rows.py", "tests/methods/test_duplex.py"],
    "duplex/layers/composition_index.py": ["tests/layers/test_composition_index.py", "tests/methods/test_compcos.py", STORED],
    "duplex/layers/indices.py": ["tests/layers/test_indices.py", "tests/layers/test_codebook.py"],
    "duplex/layers/interactions.py": ["tests/layers/test_interactions.py"],
    "duplex/layers/partners.py": ["tests/methods/test_ivr.py", "tests/methods/test_ade.py"],
    "duplex/layers/paths.py": [
        "tests/methods/test_ranges.py", STORED, "tests/methods/test_prompts.py", "tests/methods/test_duplex.py",
    ],
    "duplex/layers/portable.py": ["tests/layers/test_portable.py", "tests/methods/test_closed_form.py"],
    "duplex/layers/prompt_paths.py": ["tests/methods/test_prompts.py", STORED, "tests/methods/test_duplex.py"],
    "duplex/layers/rules.py": ["tests/methods/test_logiczsl.py"],
    "duplex/layers/sphere.py": ["tests/methods/test_lde.py"],
    "duplex/layers/statistics.py": ["tests/layers/test_gaussian_prototypes.py"],
    "duplex/layers/finetuned_blocks.py": ["tests/methods/test_with_finetuning.py", "tests/encoders/test_image_blocks.py"],
    "duplex/layers/trained_codebook.py": ["tests/layers/test_codebook.py", "tests/methods/test_duplex_rows.py"],
    "duplex/layers/word_vectors.py": ["tests/methods/test_vp_cmjl.py"],
    **{f"duplex/methods/{kind}.py": [f"tests/methods/test_{kind}.py", *FIELD] for kind in (
        "ade", "caila", "canet", "cds", "cge", "cge_visual", "closed_form", "cluspro", "co_cge", "compcos", "dfsp",
        "gipcol", "ivr", "kg_sp", "lde", "logiczsl", "plid", "prompts", "registry", "scen", "troika", "vp_cmjl",
    )},
}  # fmt: skip
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.USub: ast.UAdd,
}  # fmt: skip

HELD = {  # how much is worked on at a time, or up to which size one of two ways is taken: another number takes more or
    # less memory and time, and changes no result
    "duplex/training/scoring.py": {"BLOCK_SCORES", "SWEPT"},
    "duplex/evaluation/accumulator.py": {"CHUNK", "ORDERED", "step"},
    "duplex/evaluation/retrieval.py": {"BLOCK", "step"},
    "duplex/evaluation/scores.py": {"BLOCK"},
    "duplex/layers/word_feasibility.py": {"BLOCK", "TABLE", "step"},
    "duplex/features/decoding.py": {"AHEAD"},
    "duplex/features/inspection.py": {"CHUNK"},
    "duplex/features/layout.py": {"ROWS"},
    "duplex/features/cache_files.py": {"WINDOW"},
    "duplex/features/shards.py": {"CHUNK", "chunk"},
    "duplex/labels.py": {"MARKS"},  # up to which pairs are marked instead of sorted
    "duplex/methods/ade.py": {"held"},
    "duplex/methods/canet.py": {"SOME"},
    "duplex/methods/dfsp.py": {"held"},
    "duplex/methods/troika.py": {"held"},
    "duplex/layers/attention.py": {"HELD", "step"},
    "duplex/layers/gaussian_prototypes.py": {"CELLS", "ROWS", "step"},
    "duplex/layers/codebook.py": {"BLOCK", "CELLS", "ROWS"},
    "duplex/layers/counterfactual.py": {"BLOCK_BYTES", "size"},
    "duplex/layers/draws.py": {"STEP"},
    "duplex/layers/finetuned_blocks.py": {"IMAGES"},
}
LOOK = 0.02  # seconds between two looks at a child


@dataclass(frozen=True)
class Mutant:
    """A changed module."""

    module: str  # path
    line: int
    before: str  # the statement's own text
    after: str
    source: str

    @property
    def name(self) -> str:
        """How docs/tests.md calls it: without a line number, which would move."""
        return f"{self.module}: `{self.before}` -> `{self.after}`"


def mutants(path: Path, order: random.Random | None = None) -> Iterator[Mutant]:
    """Every change of one operator, number, truth value, condition or call whose value nobody takes; in a random
    `order`, or as they stand."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    module = path.relative_to(ROOT).as_posix()
    silent = set(_silent(tree)) | set(_held(tree, HELD.get(module, set())))
    places = [
        (number, node, change)
        for number, node in enumerate(ast.walk(tree))
        for change in range(0 if node in silent else _changes(node))
    ]
    if order is not None:
        order.shuffle(places)
    for number, node, change in places:
        changed = ast.parse(text)  # sooner done than a copy
        target = next(found for place, found in enumerate(ast.walk(changed)) if place == number)
        before = _statement(tree, node)
        _apply(changed, target, change)
        after = _statement(changed, target)
        if before is not None and after is not None and (texts := (_text(before), _text(after)))[0] != texts[1]:
            yield Mutant(module, before.lineno, *texts, ast.unparse(changed))


def _silent(tree: ast.AST) -> Iterator[ast.AST]:
    """What says nothing when a test runs: types of arguments and results, imports for types alone, `strict` of a `zip`,
    an assertion of what holds anyway, and the sign of `dim=-1`, which names the last of two dimensions as 1 does."""
    for node in ast.walk(tree):
        said = getattr(node, "annotation", None) or getattr(node, "returns", None)
        yield from ast.walk(said) if said is not None else ()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield node
        if isinstance(node, ast.keyword) and (node.arg == "strict" or ast.unparse(node) in ("dim=-1", "axis=-1")):
            yield node.value
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("softmax", "logsumexp")):
            yield from (argument for argument in node.args if ast.unparse(argument) == "-1")


def _held(tree: ast.Module, names: set[str]) -> Iterator[ast.AST]:
    """What is given one of these names."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in names:
            yield from ast.walk(statement.value)


def _changes(node: ast.AST) -> int:
    """How many ways there are to change a node."""
    if isinstance(node, ast.Compare):
        return sum(type(operator) in SWAPS for operator in node.ops)
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.AugAssign):
        return int(type(node.op) in SWAPS or isinstance(node, ast.UnaryOp))
    if isinstance(node, ast.Constant):
        return int(isinstance(node.value, bool | int | float))
    if isinstance(node, ast.If | ast.IfExp):
        return 2
    return int(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))


def _apply(tree: ast.AST, node: ast.AST, change: int) -> None:
    if isinstance(node, ast.Compare):
        places = [place for place, operator in enumerate(node.ops) if type(operator) in SWAPS]
        node.ops[places[change]] = SWAPS[type(node.ops[places[change]])]()  # type: ignore[call-overload]
    elif isinstance(node, ast.UnaryOp) and type(node.op) not in SWAPS:
        _replace(tree, node, node.operand)
    elif isinstance(node, ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.AugAssign):
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.Constant(bool(change))
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
    ast.fix_missing_locations(tree)


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list) and old in value:
                value[value.index(old)] = new


def _statement(tree: ast.AST, node: ast.AST) -> ast.stmt | None:
    """The innermost statement around a node, outside of annotations and messages."""
    found: ast.stmt | None = None
    line, column = getattr(node, "lineno", None), getattr(node, "col_offset", None)
    if line is None or column is None:
        return None
    for one in ast.walk(tree):
        if isinstance(one, ast.Raise | ast.AnnAssign) and node in ast.walk(one):
            return None
        if isinstance(one, ast.stmt) and one.lineno <= line <= (one.end_lineno or line):
            found = one
    return found


def _text(statement: ast.stmt) -> str:
    """The head of a statement on one line."""
    return ast.unparse(statement).split("\n", 1)[0].strip()


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the changed source where the module is imported."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = mutant.module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, ROOT / self.mutant.module, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.mutant.source, self.mutant.module, "exec"), vars(module))


def killed(mutant: Mutant | None, seconds: float) -> bool:
    """Whether the tests of a mutant fail, or take longer than so many seconds: it counts looks, not the clock, so that
    a run that is stopped for a while (SIGSTOP) goes on as if it had not been. None: the module as it is."""
    process = os.fork()
    if process == 0:
        _run_tests(mutant, TESTS[mutant.module] if mutant else [])
    for _ in range(round(seconds / LOOK)):
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(LOOK)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True


def _run_tests(mutant: Mutant | None, tests: list[str]) -> None:
    os.setsid()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    code: int = 3
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(BaseException):
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = scratch
        if mutant is not None:
            sys.meta_path.insert(0, _Changed(mutant))
        import pytest
        from hypothesis import Phase, settings

        settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))  # nobody reads a smaller failure
        settings.load_profile("mutants")
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other people's take longer to import than most tests
        plugins = ["-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"]
        options = ["-x", "-q", *plugins, "--hypothesis-seed=0", f"--basetemp={scratch}/t"]
        code = int(pytest.main([*options, *tests]))
    os._exit(code)


def known_survivors() -> set[str]:
    """The mutants that docs/tests.md gives a reason for."""
    path = ROOT / "docs/tests.md"
    return set(re.findall(r"^\* (duplex/\S+: `.*` -> `.*`):", path.read_text(encoding="utf-8"), re.M))


def stale(known: set[str], module: str) -> list[str]:
    """What is known of a module and is no mutant of it any more."""
    there = {name for name in known if name.startswith(f"{module}: ")}
    return sorted(there.difference(mutant.name for mutant in mutants(ROOT / module))) if there else []


def survey(modules: list[str], sample: int, seed: int) -> float:
    """Print survivors; the share of mutants killed of those that a test could notice."""
    drawn, left_out, survived, known = 0, 0, 0, known_survivors()
    for module in modules:
        for name in stale(known, module):
            print(f"no mutant any more, {name}", flush=True)
        order = mutants(ROOT / module, random.Random(seed) if sample else None)
        found = sorted(islice(order, sample or None), key=lambda mutant: mutant.line)
        noticeable = [mutant for mutant in found if mutant.name not in known]
        began = time.monotonic()
        unchanged = Mutant(module, 0, "", "", (ROOT / module).read_text(encoding="utf-8"))
        if killed(unchanged, 600):
            sys.exit(f"{module}: its tests fail as it is: {' '.join(TESTS[module])}")
        patience = 10 + 5 * (time.monotonic() - began)
        for mutant in noticeable:
            if not killed(mutant, patience):
                survived += 1
                print(f"line {mutant.line}, {mutant.name}", flush=True)
        drawn, left_out = drawn + len(found), left_out + len(found) - len(noticeable)
        counts = f"{drawn - left_out - survived} killed, {survived} survived, {left_out} left out as known"
        print(f"{module}: {len(found)} mutants; of {drawn} {counts}", file=sys.stderr, flush=True)
    share = 1 - survived / max(1, drawn - left_out)
    of_all = (drawn - left_out - survived) / max(1, drawn)
    print(f"{100 * share:.1f} % killed, {100 * of_all:.1f} % of everything drawn", file=sys.stderr)
    return share


def _import_heavy() -> None:
    """Once, not in every child; nothing that is changed."""
    from duplex.encoders.vision_ops import ensure_torchvision

    ensure_torchvision()
    for name in ("torch", "pandas", "h5py", "hypothesis", "pytest", "PIL.Image", "typer", "pydantic", "rich.progress",
                 "open_clip", "safetensors.torch", "huggingface_hub", "ruamel.yaml", "_hypothesis_pytestplugin",
                 "numpy.testing", "torch.utils.data"):  # fmt: skip
        importlib.import_module(name)
    gc.freeze()  # what is there already is no child's garbage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(TESTS), help="files of duplex/ (default: all listed)")
    parser.add_argument("--sample", type=int, default=0, help="at most so many mutants a module, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-least", type=float, default=0.95, help="share to be killed, else the exit code is 1")
    asked = parser.parse_args()
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other distributions' plugins take longer than most tests
    _import_heavy()
    with tempfile.TemporaryDirectory() as compiled:  # of what is not changed, once for all children
        sys.pycache_prefix, sys.dont_write_bytecode = compiled, False
        share = survey(asked.modules, asked.sample, asked.seed)
    sys.exit(share < asked.at_least)


if __name__ == "__main__":
    main()
