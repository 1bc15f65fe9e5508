"""One taxonomy: every operator of torch has one class, and whoever looks at a step tells the same shares."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from vivace.inspection import inspect
from vivace.ledger import Profile
from vivace.observing.observe import profile_step
from vivace.observing.reference import operator_shares
from vivace.operators import (
    CLASSES,
    KINDS,
    KINDS_OF_CLASS,
    MATRIX_CLASSES,
    MATRIX_KINDS,
    class_of,
    is_operator,
    seconds_by_class,
)
from vivace.plan import Plan
from vivace.profiling.prospects import as_profile
from vivace.profiling.seen import Seen
from vivace.profiling.trace import read_trace
from vivace.session.opening import attach
from vivace.technique import registry
from vivace.work.bins import kind_of
from vivace.work.count import Kernel, count_work

ATEN = sorted({s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")})

EXPECTED = {
    "attention": """scaled_dot_product_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention
        _scaled_dot_product_flash_attention_for_cpu _flash_attention_forward _native_multi_head_attention""",
    "recurrent": "lstm gru rnn_tanh mkldnn_rnn_layer _cudnn_rnn _cudnn_rnn_backward _thnn_fused_lstm_cell",
    "convolution": """conv2d convolution convolution_backward mkldnn_convolution cudnn_convolution_transpose
        _conv_depthwise2d conv_transpose1d thnn_conv2d""",
    "norm": """native_layer_norm native_layer_norm_backward native_batch_norm cudnn_batch_norm_backward
        native_group_norm _fused_rms_norm instance_norm batch_norm_elemt""",
    "matmul": """mm addmm bmm baddbmm mv dot matmul linear mkldnn_linear_backward_weights einsum bilinear
        _trilinear _scaled_mm _grouped_mm _addmm_activation linalg_matmul _foreach_mm""",
    "memory": """copy_ clone contiguous _to_copy _foreach_copy_ cat stack zero_ _foreach_zero_ fill_ embedding
        embedding_dense_backward _embedding_bag index index_put_ index_select gather scatter_add_ roll
        constant_pad_nd reflection_pad2d repeat select_backward masked_select view t transpose reshape
        expand as_strided empty detach slice unbind""",
    "other": """upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d upsample_trilinear3d
        _upsample_bilinear2d_aa upsample_nearest2d max_pool2d_with_indices
        max_pool2d_with_indices_backward avg_pool2d adaptive_avg_pool2d mkldnn_max_pool2d topk sort argsort
        cumsum logcumsumexp cummax unique_dim nonzero grid_sampler_2d _fft_r2c linalg_svd linalg_inv
        cholesky_solve _cdist_forward bernoulli_ uniform_ normal_ randn randperm multinomial im2col median""",
    "elementwise": """relu gelu_backward add_ mul sum mean _softmax _log_softmax_backward_data
        nll_loss_forward native_dropout where masked_fill_ copysign count_nonzero is_contiguous
        linalg_vector_norm norm cosine_embedding_loss _foreach_add_ _foreach_addcdiv_ _foreach_norm
        _fused_adam_ _fused_sgd_ threshold_backward convert_to_anything""",
}  # fmt: skip
TABLE = [(name, kind) for kind, names in EXPECTED.items() for name in names.split()]


def test_every_operator_of_torch_has_one_class_however_it_is_written():
    assert len(ATEN) > 1000
    for name in ATEN:
        bare = name.removeprefix("aten::")
        assert class_of(name) in CLASSES
        assert class_of(bare) == class_of(name) == class_of(f"{name}.out")
        assert class_of(f"{bare.rstrip('_')}_") == class_of(bare)
    assert {class_of(name) for name in ATEN} == set(CLASSES)


@pytest.mark.parametrize(("name", "kind"), TABLE)
def test_well_known_operators_are_where_an_engineer_expects_them(name, kind):
    assert class_of(f"aten::{name}") == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("flash_attn::_flash_attn_backward", "attention"),
        ("mkldnn::_linear_pointwise", "matmul"),
        ("mkldnn::_convolution_pointwise", "convolution"),
        ("torchvision::nms", "other"),
        ("torchvision::roi_align", "other"),
        ("mine::anything", "elementwise"),
    ],
)
def test_operators_of_other_libraries_have_classes_too(name, kind):
    assert class_of(name) == kind


def test_the_table_names_operators_that_this_torch_has():
    known = {name.removeprefix("aten::") for name in ATEN}
    unknown = {name for name, _ in TABLE} - known
    assert unknown == {"convert_to_anything"}


def test_each_class_says_which_kinds_of_advice_it_becomes():
    assert set(KINDS_OF_CLASS) == set(CLASSES)
    assert {kind for kinds in KINDS_OF_CLASS.values() for kind in kinds} == set(KINDS)
    assert {kind for name in MATRIX_CLASSES for kind in KINDS_OF_CLASS[name]} == set(MATRIX_KINDS)
    shapes = (
        {},
        {"window": 3.0},
        {"groups": 4, "width": 4},
        {"groups": 4, "width": 5},
        {"groups": 4, "width": 1},
    )
    for name in ATEN:
        for shape in shapes:
            bare, kind = name.removeprefix("aten::"), class_of(name)
            assert kind_of(Kernel(kind, bare, "forward", 0, (), (), **shape)) in KINDS_OF_CLASS[kind]


def test_enlarging_an_image_is_no_matrix_product():
    image = torch.ones(2, 3, 8, 8, requires_grad=True)
    work = count_work(lambda: functional.interpolate(image, scale_factor=2, mode="bilinear").sum().backward())
    assert "matmul" not in work.operators
    assert work.operators["other"].count == 2
    assert work.flops == 0


def test_the_host_counts_operators_and_a_device_all_kernels():
    spent = [
        ("aten::mm", 3.0),
        ("MmBackward0", 1.0),
        ("autograd::engine::evaluate_function: MmBackward0", 1.0),
    ]
    assert [is_operator(name) for name, _ in spent] == [True, False, False]
    assert seconds_by_class(spent, on_device=False) == {"matmul": 3.0}
    assert sum(seconds_by_class(spent, on_device=True).values()) == 5.0


class Enlarging(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, images):
        return self.up(self.down(images))


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(26))
        self.head = nn.Sequential(nn.Linear(26 * 8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers):
        return self.head(
            torch.cat([table(n) for table, n in zip(self.tables, numbers.unbind(1), strict=True)], 1)
        )


@pytest.mark.parametrize(
    ("model", "batch"),
    [(Enlarging, torch.ones(4, 3, 32, 32)), (Tables, torch.zeros(16, 26, dtype=torch.long))],
)
@pytest.mark.usefixtures("one_thread")
def test_profile_and_tune_bound_every_technique_alike_from_one_recorded_step(model, batch, tmp_path):
    model, machine = model(), inspect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(session, batch):
        with torch.profiler.record_function("vivace:step"):
            session.step(batch)

    with attach(Plan(), model=model, optimizer=optimizer, loss=lambda m, b: m(b).square().mean()) as session:
        session.step(batch)
        profiler = profile_step(session, batch, step)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_trace(tmp_path / "trace.json")
    record = {
        "device": "cpu",
        "step_seconds": trace["step_seconds"],
        "seconds": dict.fromkeys(
            ("data", "place", "forward", "backward", "update", "communication", "idle"), 0.1
        ),
        "flags": {"threads": 1},
        "features": {"batch_norm": True, "convolution_2d": True},
    }
    ours = as_profile(Seen(record, trace, machine))
    theirs = operator_shares(profiler)
    assert ours.operator_shares == pytest.approx(theirs, rel=0.02, abs=0.002)
    events = profiler.profiler.kineto_results.events()
    assert ours.num_operators == sum(is_operator(e.name()) for e in events)
    tuned = Profile(**{**vars(ours), "operator_shares": theirs})
    for cls in registry.everything():
        assert cls.gain(ours, machine) == pytest.approx(cls.gain(tuned, machine), rel=0.02)


def test_names_are_sorted_without_torch():
    code = "import sys, vivace.operators; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
