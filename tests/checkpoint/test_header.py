"""Headers: one malformed file per refusal, and never more trusting than the safetensors library."""

import json
import random
import time

import pytest
from safetensors import SafetensorError, deserialize

from lowbitcli.checkpoint import header
from lowbitcli.errors import CheckpointError
from lowbitcli.tensors import DTYPES, TensorSpec

GOOD = '{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'


def entry(dtype='"F32"', shape="[2,2]", offsets="[0,16]", more=""):
    return f'{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}}}}}'


def two(first, second, a=4, b=4):
    return (
        f'{{"a":{{"dtype":"U8","shape":[{a}],"data_offsets":{first}}},'
        f'"b":{{"dtype":"U8","shape":[{b}],"data_offsets":{second}}}}}'
    )


def meta(value):
    return f'{{"__metadata__":{value},{GOOD[1:]}'


# JSON, bytes of data after it, what the message says
MALFORMED = {
    "empty": ("", 0, "does not start with"),
    "leading space": (" " + GOOD, 16, "does not start with"),
    "list": ("[]", 0, "does not start with"),
    "unclosed": (GOOD[:-1], 16, "not JSON"),
    "trailing text": (GOOD + "x", 16, "not JSON"),
    "trailing NUL": (GOOD + "\0", 16, "not JSON"),
    "single quotes": (GOOD.replace('"', "'"), 16, "not JSON"),
    "trailing comma": (GOOD[:-1] + ",}", 16, "not JSON"),
    "control character in a name": (GOOD.replace("a", "\n", 1), 16, "not JSON"),
    "tensor twice": (f"{GOOD[:-1]},{GOOD[1:]}", 16, '"a" appears twice'),
    "field twice": (entry(more=',"dtype":"F32"'), 16, '"dtype" appears twice'),
    "metadata twice": (f'{{"__metadata__":{{}},{meta("{}")[1:]}', 16, "appears twice"),
    "metadata key twice": (meta('{"k":"a","k":"a"}'), 16, '"k" appears twice'),
    "key twice by escape": (f'{GOOD[:-1]},"\\u0061":{GOOD[5:]}', 16, '"a" appears twice'),
    "metadata list": (meta("[]"), 16, "not an object"),
    "metadata number": (meta('{"k":1}'), 16, '"k" is not a string'),
    "metadata null value": (meta('{"k":null}'), 16, '"k" is not a string'),
    "metadata nested": (meta('{"k":{}}'), 16, '"k" is not a string'),
    "surrogate in metadata": (meta('{"k":"\\ud800"}'), 16, "not Unicode"),
    "surrogate in name": (GOOD.replace("a", "\\udfff", 1), 16, "not Unicode"),
    "surrogate in unknown field": (entry(more=',"x":"\\ud800"'), 16, "not Unicode"),
    "entry null": ('{"a":null}', 0, "not an object"),
    "entry sequence": ('{"a":["F32",[2,2],[0,16]]}', 16, "not an object"),
    "no dtype": ('{"a":{"shape":[1],"data_offsets":[0,1]}}', 1, "no dtype"),
    "no shape": ('{"a":{"dtype":"U8","data_offsets":[0,1]}}', 1, "no shape"),
    "no offsets": ('{"a":{"dtype":"U8","shape":[1]}}', 1, "no data_offsets"),
    "unknown dtype": (entry('"F33"'), 16, "unknown dtype"),
    "lower-case dtype": (entry('"f32"'), 16, "unknown dtype"),
    "dtype number": (entry("3"), 16, "unknown dtype"),
    "dtype list": (entry('["F32"]'), 16, "unknown dtype"),
    "shape number": (entry(shape="4"), 16, "shape is not"),
    "shape null": (entry(shape="null"), 16, "shape is not"),
    "shape negative": (entry(shape="[-2,-2]"), 16, "shape is not"),
    "shape minus zero": (entry(shape="[-0]", offsets="[0,0]"), 0, "shape is not"),
    "shape float": (entry(shape="[2.0,2]"), 16, "shape is not"),
    "shape exponent": (entry(shape="[4e0]"), 16, "shape is not"),
    "shape bool": (entry(shape="[true,4]"), 16, "shape is not"),
    "shape string": (entry(shape='["4"]'), 16, "shape is not"),
    "shape nested": (entry(shape="[[4]]"), 16, "shape is not"),
    "shape 2^64": (entry(shape="[18446744073709551616]"), 16, "shape is not"),
    "shape overflows": (entry(shape="[4294967296,4294967296]"), 16, "overflows"),
    "shape overflows to 4": (entry(shape="[4611686018427387905,4]"), 16, "overflows"),
    "empty shape overflows": (
        entry(shape="[0,9223372036854775808,9223372036854775808]", offsets="[0,0]"),
        0,
        "overflows",
    ),
    "number of 5,000 digits": (entry(shape=f"[{'9' * 5000}]"), 16, "5000 digits"),
    "NaN": (entry(shape="[NaN]"), 16, "NaN is not JSON"),
    "Infinity": (entry(more=',"x":Infinity'), 16, "Infinity is not JSON"),
    "1e999": (entry(more=',"x":1e999'), 16, "out of range"),
    "offsets of one": (entry(offsets="[16]"), 16, "data_offsets is not"),
    "offsets of three": (entry(offsets="[0,16,16]"), 16, "data_offsets is not"),
    "offsets object": (entry(offsets='{"0":0}'), 16, "data_offsets is not"),
    "offsets float": (entry(offsets="[0,16.0]"), 16, "data_offsets is not"),
    "offsets bool": (entry(offsets="[false,16]"), 16, "data_offsets is not"),
    "offsets negative": (entry(offsets="[-16,0]"), 16, "data_offsets is not"),
    "offsets backwards": (entry(offsets="[16,0]"), 16, "expected 16 bytes"),
    "too few bytes": (entry(offsets="[0,12]"), 12, "expected 16 bytes"),
    "too many bytes": (entry(offsets="[0,20]"), 20, "expected 16 bytes"),
    "half a byte": (entry('"F4"', "[3]", "[0,1]"), 1, "whole number of bytes"),
    "hole at the start": (entry(offsets="[4,20]"), 20, "leaves a hole"),
    "hole between": (two("[0,4]", "[5,9]"), 9, "leaves a hole"),
    "overlap": (two("[0,4]", "[3,7]"), 7, "overlaps"),
    "same place": (two("[0,4]", "[0,4]"), 4, "overlaps"),
    "file too short": (GOOD, 15, "expected 81 bytes, found 80"),
    "file too long": (GOOD, 17, "expected 81 bytes, found 82"),
    "bytes without tensors": ("{}", 1, "expected 10 bytes, found 11"),
    "deep list": ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", 0, "nested too deep"),
    "deep object": ('{"a":' * 5000 + "1" + "}" * 5000, 0, "nested too deep"),
    "deep unknown field": (entry(more=',"x":' + "[" * 100 + "]" * 100), 16, "nested deeper"),
}


def stored(text, data):
    raw = text if isinstance(text, bytes) else text.encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


def lowbit_takes(blob, path):
    path.write_bytes(blob)
    try:
        return header.read(path)
    except CheckpointError:
        return None


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_is_refused_with_its_reason(case, tmp_path):
    text, data, says = MALFORMED[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(stored(text, data))
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        header.read(path)
    assert says in caught.value.message
    assert caught.value.message.startswith(str(path))
    assert caught.value.message.isprintable()
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("blob", "says"),
    [
        (b"", "0 bytes"),
        (b"\0" * 7, "7 bytes"),
        (b"\0" * 8, "does not start"),
        ((1 << 40).to_bytes(8, "little") + GOOD.encode(), "would be 1099511627776 bytes"),
        ((100_000_001).to_bytes(8, "little"), "would be 100000001 bytes"),
        (
            (99_999_999).to_bytes(8, "little") + b"{}",
            "expected a header of 99999999 bytes, found 2",
        ),
        (stored(b'{"\xff":1}', 0), "not UTF-8 at byte 2"),
        (stored(b'{"\xed\xa0\x80":1}', 0), "not UTF-8"),
        (stored(b"\xef\xbb\xbf" + GOOD.encode(), 16), "does not start"),
        (stored(GOOD.encode("utf-16-le"), 16), "not JSON"),
    ],
)
def test_malformed_bytes_are_refused(blob, says, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(blob)
    with pytest.raises(CheckpointError, match=says):
        header.read(path)


@pytest.mark.parametrize(
    "text",
    [
        GOOD + "   \n",
        meta("null"),
        meta('{"k":"v\\u00e9"}'),
        entry(more=',"x":[-1,1.5,{"y":null}]'),
        entry('"F4"', "[2,16]", "[0,16]"),
        entry('"F6_E2M3"', "[4]", "[0,3]"),
        entry(shape="[0,4]", offsets="[0,0]"),
        two("[4,8]", "[0,4]"),
        two("[4,4]", "[0,4]", a=0),
        GOOD.replace('"a"', '""'),
    ],
)
def test_odd_but_valid_is_taken_as_the_library_takes_it(text, tmp_path):
    for data in (0, 3, 4, 8, 16):
        blob = stored(text, data)
        try:
            theirs = {name: tuple(found["shape"]) for name, found in deserialize(blob)}
        except SafetensorError:
            continue
        ours = lowbit_takes(blob, tmp_path / "x.safetensors")
        assert ours is not None
        assert {name: x.spec.shape for name, x in ours.entries.items()} == theirs
        return
    pytest.fail("the library took none of them")


def mutated(rng, blob):
    blob = bytearray(blob)
    tokens = [b"0", b"-0", b"1e1", b"[", b"{}", b'"', b",", b"null", b"F16", b"\\ud83d", b"9" * 20]
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(8, len(blob))
        choice = rng.randrange(5)
        if choice == 0:
            blob[at] = rng.randrange(256)
        elif choice == 1:
            del blob[at : at + rng.randint(1, 4)]
        elif choice == 2:
            blob[at:at] = rng.choice(tokens)
        elif choice == 3:
            digits = [i for i, c in enumerate(blob) if i >= 8 and 48 <= c < 58]
            blob[rng.choice(digits)] = 48 + rng.randrange(10)
        else:
            blob += bytes(rng.randint(1, 3))
    if rng.random() < 0.8:
        end = blob.rfind(b"}") + 1
        blob[:8] = max(end - 8, 0).to_bytes(8, "little")
    return bytes(blob)


def test_never_takes_what_the_library_refuses(tmp_path):
    rng = random.Random(7)
    seeds = [
        stored(GOOD, 16),
        stored(meta('{"format":"pt"}'), 16),
        stored(two("[0,4]", "[4,8]"), 8),
        stored(entry('"F4"', "[2,16]", "[0,16]", ',"x":[1.5,-2]'), 16),
    ]
    refused = taken = 0
    for _ in range(600):
        blob = mutated(rng, rng.choice(seeds))
        try:
            deserialize(blob)
        except SafetensorError:
            refused += 1
            assert lowbit_takes(blob, tmp_path / "x") is None, blob
        else:
            taken += lowbit_takes(blob, tmp_path / "x") is not None
    assert refused > 100 and taken > 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_our_dtypes_are_the_librarys(dtype):
    first, entries = header.lay_out([TensorSpec("a", dtype, (8,))], {})
    assert (
        deserialize(first + bytes(entries["a"].stop - entries["a"].start))[0][1]["dtype"] == dtype
    )


def test_layout_is_aligned_deterministic_and_read_back():
    specs = [
        TensorSpec(name, dtype, shape)
        for name, dtype, shape in [
            ("z", "F64", (3,)),
            ("b", "U8", (5,)),
            ("a", "BF16", (3, 3)),
            ("\u00e9\U0001f600", "F32", ()),
            ("empty", "F32", (0, 7)),
            ("half", "F4", (2, 3)),
        ]
    ]
    metadata = {"format": "pt", "a": "\u202e"}
    first, entries = header.lay_out(specs, metadata)
    again, _ = header.lay_out(reversed(specs), dict(reversed(metadata.items())))
    assert first == again
    assert len(first) % 8 == 0
    for name, x in entries.items():
        assert x.start % max(1, DTYPES[x.spec.dtype][0] // 8) == 0, name
    assert list(json.loads(first[8:])) == [
        "__metadata__", "z", "empty", "\u00e9\U0001f600", "a", "b", "half"
    ]  # fmt: skip
    size = max(x.stop for x in entries.values())
    found = header.parse(first[8:], size, "x")
    assert dict(found.entries) == entries
    assert found.metadata == metadata
    assert len(deserialize(first + bytes(size - len(first)))) == len(specs)


def test_layout_refuses_a_name_twice():
    with pytest.raises(ValueError, match="twice"):
        header.lay_out([TensorSpec("a", "U8", (1,)), TensorSpec("a", "F32", (1,))], {})


def test_names_are_escaped_in_messages():
    with pytest.raises(CheckpointError) as caught:
        header.parse(entry('"X"').replace('"a"', '"\\u001b[31m\\u202e"').encode(), 99, "x")
    assert "\\x1b[31m\\u202e" in caught.value.message and "\x1b" not in caught.value.message


def test_a_pipe_is_refused(tmp_path):
    import os

    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        header.read(tmp_path / "x.safetensors")
