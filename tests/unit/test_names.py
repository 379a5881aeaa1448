"""Names: every spelling that Dynamo has for a module's tensor, and identifiers."""

from __future__ import annotations

import pytest

from fxoffload.names import claim, dotted_name, identifier


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']._modules['blocks']._modules['0']._parameters['w']", "blocks.0.w"),
        ("L['self'].__dict__['_modules']['blocks'].__dict__['_modules']['0'].__dict__['_parameters']['w']", "blocks.0.w"),
        ("L['args'][0]._modules['layers']._modules['11']._buffers['inv_freq']", "layers.11.inv_freq"),
        ("L['self'].blocks[3].up.weight", "blocks.3.up.weight"),
        ("L['self'].scale", "scale"),
        ("L['self']._parameters['scale_shift_table']", "scale_shift_table"),
        ("L['self']._modules['_orig_mod']._modules['out']._parameters['bias']", "out.bias"),
        ("L['fn'].model.norm.weight", "model.norm.weight"),
        ("G['model']._modules['out']._parameters['weight']", "out.weight"),
        ("""L['self']._modules["blocks"]._parameters["w"]""", "blocks.w"),
        ("L['self']._modules['parameters']._parameters['buffers']", "parameters.buffers"),
        ("L['self']", ""),
        ("blocks.0.up", "blocks.0.up"),
        ("", ""),
    ],
)
def test_dotted_name(path: str, name: str) -> None:
    assert dotted_name(path) == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("blocks.3", "blocks_3"),
        ("blocks.3:1", "blocks_3_1"),
        ("blocks.3#1", "blocks_3_1"),
        ("blocks.3.shared+", "blocks_3_shared_"),
        ("3.up", "_3_up"),
        ("", "_"),
        ("shared", "shared"),
    ],
)
def test_identifier(name: str, text: str) -> None:
    assert identifier(name) == text
    assert text.isidentifier()


def test_a_name_is_claimed_once() -> None:
    taken: set[str] = set()
    assert [claim("w", taken) for _ in range(3)] == ["w", "w~2", "w~3"]
    assert claim("a.b", taken, spell=identifier) == "a.b"
    assert claim("a_b", taken, spell=identifier) == "a_b~2"
