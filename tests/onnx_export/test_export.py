"""Whole models in ONNX: weights that are stored, sizes that change, and what is refused."""

import pytest
import torch

pytest.importorskip("onnxscript", reason="onnxscript is not installed")
pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

from lowbit_kernels import fake_quant as f
from lowbitcli import onnx_export
from tests.onnx_export import graphs

BLOCKS = torch.linspace(1, 3, 128)
WEIGHTS = {  # what rounds a weight [32, 64]; types of what is stored, ONNX' numbers
    "nvfp4": (lambda w: f.dynamic_block_quant(w, 16, None, None, (2, 1), (4, 3)), {23, 17, 1}),
    "mxfp8": (lambda w: f.dynamic_block_quant(w, 32, None, None, (4, 3), (8, 0)), {17, 1}),
    "static": (lambda w: f.static_block_fp4(w, BLOCKS), {23, 1}),
    "int4": (lambda w: f.fake_tensor_quant(w, BLOCKS.view(32, 4), None, 4, block_size=16), {22, 1}),
    "int8": (lambda w: f.fake_tensor_quant(w, torch.tensor(2.0), narrow_range=False), {3, 1}),
    "fp8": (lambda w: f.scaled_e4m3(w, w.abs().amax(1, keepdim=True)), {17, 1}),
}


class Model(torch.nn.Module):
    """A linear layer for each way to round a weight, after an MXFP8 input."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weights = torch.nn.ParameterList(
            torch.randn(32, 64, generator=generator) for _ in WEIGHTS
        )

    def forward(self, x):
        x = f.dynamic_block_quant(x, 32, None, None, (4, 3), (8, 0))
        pairs = zip(self.weights, WEIGHTS.values(), strict=True)
        return tuple(x @ call(w).T for w, (call, _) in pairs)


def test_a_model_of_any_batch_with_weights_stored_or_not(tmp_path):
    model, path = Model(), tmp_path / "model.onnx"
    shapes = {"x": {0: torch.export.Dim("batch")}}
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    both = [
        graphs.exported(model, x, dynamic_shapes=shapes),
        graphs.exported(model, x, path=path, dynamic_shapes=shapes, onnx_quantizer_type="static"),
    ]
    for batch in (1, 5):
        fresh, stored = (graphs.by_reference(one, x[:batch]) for one in both)
        assert all(map(torch.equal, fresh, stored))
        for got, want in zip(fresh, model(x[:batch]), strict=True):
            assert (got - want).abs().max() < 1e-4  # sums in another order
    counted = [[n.op_type for n in one.graph.node].count("QuantizeLinear") for one in both]
    assert counted == [1 + len(WEIGHTS) + 2, 1]  # the scales of nvfp4 and static are rounded too
    held = [i for i in both[1].graph.initializer if list(i.dims) == [32, 64]]
    assert sorted(i.data_type for i in held) == [3, 17, 17, 22, 23, 23]
    types = {i.data_type for i in both[1].graph.initializer}
    assert types == set().union({7}, *(kinds for _, kinds in WEIGHTS.values()))
    assert sum(len(i.raw_data) for i in held) == 3 * 32 * 64 + 3 * 32 * 32
    assert path.stat().st_size == both[1].ByteSize()


class Plain(torch.nn.Module):
    def forward(self, x):
        return x + 1


def test_a_model_that_rounds_no_weight_has_nothing_to_store():
    x = torch.ones(2, 3)
    model = graphs.exported(Plain(), x, onnx_quantizer_type="static")
    assert torch.equal(graphs.by_reference(model, x)[0], x + 1)


def test_refused():
    x = torch.ones(2, 32)
    with pytest.raises(ValueError, match="23 is the first"):
        onnx_export.export(Plain(), (x,), opset_version=22)
    with pytest.raises(ValueError, match="no operator set 99: the onnx that is here ends at"):
        onnx_export.export(Plain(), (x,), opset_version=99)
    with pytest.raises(ValueError, match="no dtype 'Double'"):
        onnx_export.export(Plain(), (x,), trt_high_precision_dtype="Double")
    with pytest.raises(ValueError, match="dynamic or static"):
        onnx_export.export(Plain(), (x,), onnx_quantizer_type="fixed")


def test_arguments_of_wrong_types_are_refused_by_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = torch.ones(2, 32)
    right = {"model": Plain(), "args": (x,)}
    wrong = {
        "model": [None, "model", Plain],
        "args": [None, x, "x", {"x": x}, 5],
        "path": [5, True, [1]],
        "trt_high_precision_dtype": [5, torch.float16, ["Float"]],
        "onnx_quantizer_type": [None, 5, ["static"]],
        "exact": [None, 1, "yes"],
        "opset_version": [None, "23", 23.0, True],
        "kwargs": ["x", [1], {1: x}],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^{name} is "):
                onnx_export.export(**{**right, name: value})
    for name in ("trt_high_precision_dtype", "exact"):
        with pytest.raises(ValueError, match=rf"^{name} is "):
            onnx_export.translations(**{name: wrong[name][1]})
    assert not list(tmp_path.iterdir())


def test_a_model_of_another_set_than_was_asked_for_is_refused(monkeypatch):
    """As torch makes one, without a word, of a set that it does not know."""
    monkeypatch.setattr(onnx_export.translate, "LAST_OPSET", 99)
    with pytest.raises(ValueError, match=r"a model of operator set \d+ instead"):
        onnx_export.export(Plain(), (torch.ones(2, 3),), opset_version=99)


@pytest.mark.parametrize(
    ("call", "options", "words"),
    [
        (
            lambda x: f.dynamic_block_quant(x, 32, None, None, (2, 3), (8, 0)),
            {},
            "MXFP6 cannot be exported",
        ),
        (f.scaled_e4m3, {"trt_high_precision_dtype": "Half"}, "exported as such"),
        (
            lambda x: f.fake_tensor_quant(x, x.abs().amax(1, keepdim=True), axis=0),
            {"dynamic_shapes": {"x": {0: torch.export.Dim("rows")}}},
            "not known before",
        ),
    ],
)
def test_the_exporter_says_what_cannot_be_translated(call, options, words):
    class One(torch.nn.Module):
        def forward(self, x):
            return call(x)

    with pytest.raises(torch.onnx.errors.OnnxExporterError, match=words):
        graphs.exported(One(), torch.ones(2, 32), **options)
