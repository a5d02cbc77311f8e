"""Identity and canonical configurations: what changes the numbers changes the root, what only names does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.block.framing import frame, unframe
from headstart.block.identity import Identity, canonical_architecture

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100000,
    "rope_scaling": None,
    "sliding_window": None,
    "rms_norm_eps": 1e-05,
    "quantization_config": {"bits": 4, "dtype": "int4"},
    "text_config": {"hidden_size": 64, "torch_dtype": "bfloat16", "_name_or_path": "inner"},
    "_name_or_path": "someone/model",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "bos_token_id": 0,
    "use_cache": True,
}


@given(st.binary(max_size=20), *[st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted)] * 2)
def test_where_a_field_ends_is_part_of_the_root(data, one, other):
    identities = [
        Identity(weights=b"w" + data[:first], architecture=data[first:second], adapters=(b"x" + data[second:],))
        for first, second in (one, other)
    ]
    assert (identities[0].root() == identities[1].root()) == (identities[0] == identities[1])


@given(st.binary(min_size=2, max_size=20), st.integers(0, 20))
def test_adapters_are_not_joined(data, cut):
    cut = 1 + cut % (len(data) - 1)
    split = Identity(b"w", b"a", adapters=(data[:cut], data[cut:]))
    assert split.root() != Identity(b"w", b"a", adapters=(data,)).root()


def test_the_order_of_adapters_counts():
    assert Identity(b"w", b"a", adapters=(b"1", b"2")).root() != Identity(b"w", b"a", adapters=(b"2", b"1")).root()


def test_an_empty_version_is_not_an_absent_one():
    assert Identity(b"w", b"a", version="").root() != Identity(b"w", b"a").root()


def test_weights_and_adapters_need_a_digest():
    with pytest.raises(ValueError, match="digest"):
        Identity(b"", b"a")
    with pytest.raises(ValueError, match="digest"):
        Identity(b"w", b"a", adapters=(b"",))


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=9)), max_size=5))
def test_framed_fields_come_back_as_they_went_in(fields):
    data = b"".join(frame(tag, value) for tag, value in fields)
    assert unframe(data) == fields
    for end in range(len(data)):
        try:
            assert unframe(data[:end]) == fields[: len(unframe(data[:end]))]
        except ValueError:
            continue


@pytest.mark.parametrize("name", ["_name_or_path", "torch_dtype", "transformers_version", "bos_token_id", "use_cache"])
def test_names_and_defaults_do_not_change_the_architecture(name):
    want = canonical_architecture(CONFIG)
    assert canonical_architecture({**CONFIG, name: "another"}) == want
    assert canonical_architecture({key: value for key, value in CONFIG.items() if key != name}) == want


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10000},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"sliding_window": 4096},
        {"num_key_value_heads": 9},
        {"quantization_config": {"bits": 4, "dtype": "int8"}},
        {"text_config": {"hidden_size": 65}},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_everything_else_changes_it(change):
    assert canonical_architecture({**CONFIG, **change}) != canonical_architecture(CONFIG)


def test_nested_configurations_lose_their_names_and_order_does_not_count():
    renamed = {**CONFIG, "text_config": {"_name_or_path": "elsewhere", "hidden_size": 64}}
    assert canonical_architecture(dict(reversed(renamed.items()))) == canonical_architecture(CONFIG)
    assert json.loads(canonical_architecture(CONFIG))["text_config"] == {"hidden_size": 64}
