"""What is asked of the Hugging Face hub: of a hub that does not answer each name would cost half a minute."""

from __future__ import annotations

from pathlib import Path

from penstock.pipeline.config import load
from penstock.pipeline.preflight.hub import keys

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ROWS = "{type: hub, path: someone/rows, prompt_key: question, truth_key: answer}"


def test_all_that_lies_there_is_known(tmp_path: Path) -> None:
    overrides = [
        "model={type: pretrained, path: someone/policy}",
        "reference.path=someone/reference",
        "scorers.maths={scorer: teacher, columns: {maths: token}, options: {path: someone/teacher, column: maths}}",
        "scorers.taste={scorer: reward_model, columns: {preference: trajectory}, options: {path: someone/judge}}",
        f"scorers.here={{scorer: reward_model, columns: {{here: trajectory}}, options: {{path: {tmp_path}}}}}",
        "scorers.mine={scorer: 'mine:Scorer', columns: {mine: token}, options: {path: someone/else}}",
        f"prompts.train={{type: mix, sources: {{a: {ROWS}}}}}",
        f"prompts.eval={{b: {ROWS}}}",
    ]
    assert keys(load(QUICKSTART, overrides)) == {
        "model.path",
        "reference.path",
        "scorers.maths.options.path",
        "scorers.taste.options.path",
        "prompts.train.sources.a.path",
        "prompts.eval.b.path",
    }
