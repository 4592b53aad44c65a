"""Names of an earlier version are refused with the present name, in params.yaml and in checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from duplex.config.params import load_params
from duplex.errors import UsageError
from duplex.methods.registry import parse_options
from duplex.options import FinetuneOptions, OptionError
from duplex.system.renamed import COMMAND_OPTIONS, METHODS, REMOVED, VALUES, renamed_option
from tests.subprocesses import ROOT
from tests.system.test_code_hash import change


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{extends: duplex, graph", "{of: duplex, graph", "methods.duplex_static.of was renamed: write extends"),
        ("per_dataset: {shapes", "on: {shapes", "methods.dual_finetuned.on was renamed: write per_dataset"),
        ("{shapes: {finetune:", "{shapes: {tail:", "per_dataset.shapes.tail was renamed: write finetune"),
        ("{blocks: 4", "{depth: 4", "methods.dual_finetuned.finetune.depth: was renamed: write blocks"),
        ("adapter: full", "adapter: trained", "dual_finetuned.finetune.adapter: trained was renamed: write full"),
        ("tiny, block_inputs: 4", "tiny, depth: 4", "shapes.encoder.depth: was renamed: write block_inputs"),
        ("tiny, block_inputs: 4", "tiny, deep_test: false", f"shapes.encoder.deep_test: {REMOVED}"),
        ("tokens: none", "views: 4", f"extraction.views: {REMOVED}"),
        ("encoder: {name: tiny", "views: 4\n    encoder: {name: tiny", f"shapes.views: {REMOVED}"),
        ("encoder: {name: tiny", "flip: true\n    encoder: {name: tiny", f"shapes.flip: {REMOVED}"),
        ("  block_inputs: 0", "  depth: 0", "extraction.depth: was renamed: write block_inputs"),
        ("{extends: duplex, graph: false}", "{extends: duplex, nodes: label}", f"duplex_static.nodes: {REMOVED}"),
        ("paths: composition", "paths: c", "methods.clip.paths: c was renamed: write composition"),
        ("losses: [semantic]", "losses: [ct]", "methods.coop.losses: ct was renamed: write semantic"),
        ("dual, dual_finetuned]", "duplex_plus]", "method duplex_plus was renamed: write dual"),
        ("extends: dual,", "extends: duplex_plus,", "extends is 'duplex_plus'; method duplex_plus was renamed"),
    ],
)
def test_an_old_name_in_params_yaml_is_one_line_with_the_new_one(tmp_path: Path, old: str, new: str, message: str):
    path = tmp_path / "params.yaml"
    path.write_text((ROOT / "params.yaml").read_text())
    change(path, old, new)
    with pytest.raises(UsageError) as caught:
        load_params(path).check_entries()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_old_names_of_options_are_refused_wherever_they_are_read_from():
    """Checkpoints hold options as params.yaml does, and are read by the same classes."""
    with pytest.raises(OptionError, match="depth: was renamed: write blocks"):
        FinetuneOptions.from_dict({"depth": 1})
    with pytest.raises(OptionError, match="inference: so was renamed: write factors"):
        parse_options("duplex", {"inference": ["so"]})


def test_an_old_command_line_option_is_answered_with_the_new_one():
    assert renamed_option("--depth") == "--depth was renamed: write --block-inputs"
    assert renamed_option("--no-deep-test") == f"--no-deep-test {REMOVED}"
    assert renamed_option("--dataset") is None


def test_no_old_name_is_in_use():
    assert not set(METHODS) & set(load_params(ROOT / "params.yaml").methods)
    assert not set(VALUES) & set(VALUES.values())
    assert not set(COMMAND_OPTIONS) & set(COMMAND_OPTIONS.values())
