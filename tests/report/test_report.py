"""The same results as a page, as data and in the terminal."""

import dataclasses
import json
import re

import jsonschema
import pytest
from rich.console import Console

from assay import report
from assay._findings import MAX_FINDINGS, Finding
from assay.examine import SECTIONS, Skipped, examine


def test_the_document_follows_its_schema(examination):
    document = report.findings_document(examination)
    jsonschema.Draft202012Validator.check_schema(report.schema())
    jsonschema.validate(document, report.schema())
    json.dumps(document, allow_nan=False)
    assert 3 <= len(document["findings"]) <= MAX_FINDINGS


def test_the_schema_would_notice(examination):
    document = report.findings_document(examination)
    for breaking in ({"version": 2}, {"findings": [{}]}, {"sections": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document | breaking, report.schema())


def test_planted_parts_are_found(examination):
    first = examination.findings[0]
    assert (first.key, first.level) == ("dead-parts", "warning")
    assert "unit 37 of layer 2" in first.sentence
    assert "head 2 of layer 1" in first.sentence
    assert bool(examination.heads.inactive[1, 2]) or examination.heads.tolerated is None
    assert examination.rope.label[0][5] == "positional"


def test_every_finding_has_a_number_an_uncertainty_and_a_command(examination):
    for finding in examination.findings:
        assert finding.uncertainty
        assert finding.command.startswith("assay ")
        assert isinstance(finding.number, int | float)


def test_the_page_needs_no_network_and_escapes_what_strangers_send(examination):
    evil = "<script>alert(1)</script>"
    finding = Finding("x", "note", evil, 1.0, evil, None, None, evil, evil, "health")
    changed = dataclasses.replace(
        examination,
        findings=(finding,),
        model=dataclasses.replace(examination.model, name=evil, model_type="</script>"),
        skipped=(Skipped("loss", evil),),
        loss=None,
    )
    page = report.examination_page(changed)
    assert evil not in page
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", outside)
    assert "&lt;script&gt;alert(1)" in page


def test_the_terminal_fits_a_screen(examination):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.print_examination(examination, console)
    text = console.export_text()
    assert len(text.splitlines()) <= 45
    for finding in examination.findings:
        assert finding.command in text


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_alone(section):
    examination = examine("builtin:tiny-lm", level="quick", tokens=256, context=32, only=[section])
    document = report.findings_document(examination)
    jsonschema.validate(document, report.schema())
    assert sum(v is not None for v in document["sections"].values()) == 1
    assert report.examination_page(examination)


def test_an_examination_is_deterministic():
    def run():
        document = report.findings_document(examine("builtin:tiny-lm", level="quick", tokens=256, context=32))
        return {k: v for k, v in document.items() if k != "cost"}

    assert run() == run()


def test_a_loaded_model_is_taken_too():
    from assay.core.checkpoint import Checkpoint
    from assay.reference import builtin

    checkpoint = Checkpoint(builtin("tiny-lm").load())
    before = checkpoint.load()
    loaded = checkpoint.load()
    examination = examine((loaded, checkpoint.tokenizer()), level="quick", tokens=256, context=32)
    assert examination.model.architecture == "LlamaForCausalLM"
    for a, b in zip(before.parameters(), loaded.parameters()):
        assert (a == b).all()
