"""Activation statistics: those of everything that a layer gave, whatever batches it came in, and nothing kept of it."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import saliency
from saliency.errors import ImageError, LayerError, MethodError, ModelError
from saliency.inspection import edit_activations
from saliency.inspection.layers import layer_table
from saliency.inspection.recording import record
from saliency.inspection.statistics import (
    ActivationStatistics,
    LayerActivations,
    activation_statistics,
    gradient_statistics,
)
from saliency.testing import Snapshot, images, tiny_model
from tests.models import OwnForward, Raises, torchvision_models
from tests.threads import in_threads


def outputs(model: nn.Module, batches: list[Tensor]) -> dict[tuple[str, int], list[Tensor]]:
    """What each call of each layer returned, by plain hooks that copy it."""
    found: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    calls: dict[str, int] = defaultdict(int)

    def hook_of(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            found[name, calls[name]].append(output.detach().clone())
            calls[name] += 1

        return hook

    handles = [module.register_forward_hook(hook_of(name)) for name, module in model.named_modules() if name]
    with torch.no_grad():
        for each in batches:
            calls.clear()
            model(each.clone())
    for handle in handles:
        handle.remove()
    return found


def assert_moments(row: LayerActivations, parts: list[Tensor], rounding: float = 1e-12) -> None:
    """That a row is what numpy says of everything together."""
    flat = np.concatenate([each.double().numpy().reshape(-1) for each in parts])
    finite = flat[np.isfinite(flat)]
    assert row.count == len(flat)
    assert row.zero_share == (flat == 0).sum() / len(flat)
    assert (row.nan, row.inf) == (np.isnan(flat).sum(), np.isinf(flat).sum())
    scale = float(np.abs(finite).max())
    assert row.mean == pytest.approx(float(finite.mean()), abs=rounding * scale)
    assert row.std == pytest.approx(float(finite.std()), abs=rounding * scale, rel=100 * rounding)
    assert (row.min, row.max) == (finite.min(), finite.max())


def dead_by_hand(parts: list[Tensor], axis: int) -> tuple[int, ...]:
    highest = [each.double().movedim(axis, 0).flatten(1).amax(1) for each in parts]
    return tuple((~(torch.stack(highest).amax(0) > 0)).nonzero().flatten().tolist())


# The numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_numpys_of_all_batches_together(dtype: torch.dtype, layout: torch.memory_format) -> None:
    model = tiny_model().to(dtype).to(memory_format=layout)
    batches = [images(n, seed=n).to(dtype).contiguous(memory_format=layout) for n in (1, 5, 2)]
    found = outputs(model, batches)
    table = activation_statistics(model, iter(batches))
    assert {(row.name, row.call) for row in table} == set(found)
    for row in table:
        assert_moments(row, found[row.name, row.call])
        assert row.dead == dead_by_hand(found[row.name, row.call], 1)
        assert row.channels == found[row.name, row.call][0].shape[1]
        assert row.kind == type(model.get_submodule(row.name)).__name__
    assert (table.images, table.batches) == (8, 3)
    assert "3 batches, 8 images" in table.notes


def test_a_layer_that_is_called_again_has_a_row_for_each_call_in_order() -> None:
    table = activation_statistics(tiny_model(), images(2))
    names = [(row.name, row.call, row.calls) for row in table]
    assert names == [
        ("stem", 0, 1),
        ("norm", 0, 1),
        ("relu", 0, 2),
        ("down", 0, 1),
        ("drop", 0, 1),
        ("last", 0, 1),
        ("relu", 1, 2),
        ("pool", 0, 1),
        ("head", 0, 1),
    ]
    assert "relu (1)" in str(table)
    assert "relu (2)" in str(table)


def test_a_row_is_of_what_flows_on_behind_the_users_own_hooks() -> None:
    model, x = nn.Sequential(nn.Identity()), images(2)
    handle = model[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    assert activation_statistics(model, x)["0"].max == pytest.approx(3 * float(x.max()))
    handle.remove()
    assert activation_statistics(model, x)["0"].max == pytest.approx(float(x.max()))


def test_an_operation_in_place_behind_a_layer_does_not_reach_its_row() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Hardtanh(0, 0.1, inplace=True))
    table = activation_statistics(model, images(2))
    assert table["0"].min < 0
    assert table["1"].min == 0
    assert table["1"].max > 0.1
    assert table["2"].max == pytest.approx(0.1)


def test_a_mean_far_above_the_deviation_cancels_nothing_over_many_batches() -> None:
    model = nn.Sequential(nn.Identity())
    batches = [1e6 + images(3, seed=seed, dtype=torch.float64) for seed in range(50)]
    row = activation_statistics(model.double(), iter(batches))["0"]
    whole = torch.cat(batches).numpy()
    assert row.std == pytest.approx(float(whole.std()), rel=1e-9)
    assert row.mean == pytest.approx(float(whole.mean()), rel=1e-15)


def test_of_several_tensors_the_first_one_counts_and_a_layer_without_any_has_no_row() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"none": None, "deep": [x + 1, x + 2]}

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many, self.nothing, self.spare = Many(), Nothing(), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.nothing(x)
            out: Tensor = self.many(x)["deep"][1]
            return out

    x = images(2)
    table = activation_statistics(Model(), x)
    assert [row.name for row in table] == ["many"]
    assert table["many"].mean == pytest.approx(float((x + 1).mean()), abs=1e-6)


def test_a_model_that_is_one_layer_itself_has_one_row() -> None:
    table = activation_statistics(nn.ReLU(), images(2))
    assert [(row.name, row.kind) for row in table] == [("", "ReLU")]
    assert "(the model)" in str(table)


def test_a_call_that_comes_up_in_a_later_batch_only_has_a_row_at_the_end() -> None:
    class Wanders(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.end = nn.ReLU(), nn.ReLU(), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if len(x) > 1:
                x = self.middle(x)
            out: Tensor = self.end(x)
            return out

    table = activation_statistics(Wanders(), [images(1), images(2)])
    assert [row.name for row in table] == ["first", "end", "middle"]
    assert [row.count for row in table] == [3 * 768, 3 * 768, 2 * 768]


# Channels ------------------------------------------------------------------------------------------------------------


def test_a_channel_is_dead_only_where_no_batch_and_no_place_lifts_it_above_zero() -> None:
    conv = nn.Conv2d(1, 3, 1, bias=False)
    model = nn.Sequential(conv, nn.ReLU())
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([1.0, -1.0, 0.0]).view(3, 1, 1, 1))
    low, high = torch.full((2, 1, 4, 4), -1.0), torch.full((1, 1, 4, 4), -1.0)
    high[0, 0, 3, 3] = 1e-30
    assert activation_statistics(model, [low])["1"].dead == (0, 2)
    assert activation_statistics(model, [low, low])["1"].dead == (0, 2)
    assert activation_statistics(model, [low, high])["1"].dead == (2,)
    assert activation_statistics(model, [high, low])["1"].dead == (2,)
    assert activation_statistics(model, [high.abs()])["1"].dead == (1, 2)


def test_a_channel_of_nan_is_not_called_dead() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())
    with torch.no_grad():
        model.get_parameter("0.bias").copy_(torch.tensor([math.nan, -9.0]))
    assert activation_statistics(model, images(1)[:, :1])["1"].dead == (1,)


class Swinlike(nn.Module):
    """Channels last from the patches on: (N, h, w, K)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 2, 2)
        self.norm = nn.LayerNorm(6)
        self.act = nn.ReLU()
        self.wide = nn.Linear(6, 10)
        self.gelu = nn.GELU()
        self.block = nn.Sequential(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.patches(x).permute(0, 2, 3, 1)))
        out: Tensor = self.block(self.gelu(self.wide(x))).mean((1, 2))
        return out


def test_channels_are_on_the_axis_that_is_stated() -> None:
    model = Swinlike()
    with torch.no_grad():
        model.get_parameter("norm.bias")[2] = -1e3
    table = activation_statistics(model, images(2), layers=["norm", "act", "wide"], channel_axis=-1)
    assert [row.channels for row in table] == [6, 6, 10]
    assert table["act"].dead == dead_by_hand(outputs(model, [images(2)])["act", 0], 3) == (2,)
    assert table.dead_channels == 1
    assert activation_statistics(model, images(2), layers="patches")["patches"].channels == 6
    for axis in (0, 2, "last"):
        with pytest.raises(MethodError, match="is not one of 1, -1"):
            activation_statistics(model, images(2), channel_axis=axis)  # type: ignore[arg-type]


def test_channels_of_sequences_and_volumes_are_where_their_convolutions_put_them() -> None:
    line = nn.Sequential(nn.Conv1d(3, 5, 3), nn.ReLU(), nn.BatchNorm1d(5))
    assert [row.channels for row in activation_statistics(line, torch.randn(2, 3, 9))] == [5, 5, 5]
    volume = nn.Sequential(nn.Conv3d(3, 5, 1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 8, 4), nn.ReLU())
    assert [row.channels for row in activation_statistics(volume, torch.randn(2, 3, 2, 2, 2))] == [5, 5, 40, 4, 4]


def test_an_output_without_channels_and_one_with_another_number_each_time_have_none() -> None:
    class Total(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum((1, 2, 3))

    assert activation_statistics(nn.Sequential(Total()), images(3))["0"].channels is None

    class Places(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(2).sum(1)

    row = activation_statistics(nn.Sequential(Places()), [images(1), images(1, (8, 8)), images(1)])["0"]
    assert (row.channels, row.dead) == (None, ())


def test_dead_channels_are_counted_in_relus() -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout())
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5), nn.ReLU6())
    with torch.no_grad():
        body.get_parameter("0.bias")[1] = -1e3
        model.get_parameter("3.bias")[2:4] = -1e3
    table = activation_statistics(model, images(2))
    assert table["0.2"].dead == table["0.3"].dead == table["0"].dead == table["1"].dead == (1,)
    assert set(table["4"].dead) >= {2, 3}
    assert table.dead_channels == 1 + len(table["4"].dead)
    assert f"{table.dead_channels} dead channels in ReLUs" in table.notes


def test_the_dead_channels_of_a_functional_relu_are_in_the_row_of_the_layer_around_it() -> None:
    inner = OwnForward(lambda model, x: F.relu(model.conv(x)), conv=nn.Conv2d(3, 4, 1))
    with torch.no_grad():
        inner.get_parameter("conv.bias")[0] = -1e3
    table = activation_statistics(nn.Sequential(inner, nn.Sigmoid()), images(2))
    assert table["0"].dead == table["0.conv"].dead == (0,)
    assert table.dead_channels == 0


def dead_cells(table: ActivationStatistics) -> dict[str, str]:
    """Return the text in the column "dead", by layer; "" if the table has no such column."""
    dead = next((each.text for each in table.columns if each.title == "dead"), lambda row: "")
    return {row.name: dead(row) for row in table}


def test_dead_channels_are_shown_where_the_smallest_output_is_zero() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 3))
    with torch.no_grad():
        model.get_parameter("0.bias")[1] = -1e3
        model.get_parameter("3.bias")[2] = -1e3
    table = activation_statistics(model, images(2))
    assert (table["0"].dead, table["1"].dead, table["3"].dead) == ((1,), (1,), (2,))
    assert dead_cells(table) | {"2": ""} == {"0": "", "1": "1", "2": "", "3": ""}


def test_rows_come_as_the_layers_begin_a_container_before_its_parts_as_in_the_layer_table() -> None:
    model = torchvision_models().resnet18(weights=None)
    names = [row.name for row in layer_table(model, images(1), times=False)]
    assert list(dict.fromkeys(row.name for row in activation_statistics(model, images(1)))) == names
    assert list(dict.fromkeys(row.name for row in gradient_statistics(model, images(1)))) == names


def test_a_call_that_raised_or_gave_no_tensor_leaves_no_gap_among_the_calls() -> None:
    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor | None:
            if x.shape[1] == 2:
                raise ValueError
            return x if x.shape[1] > 1 else None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Fragile()

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ValueError):
                self.part(x[:, :2])
            self.part(x[:, :1])
            self.part(x)
            out: Tensor = self.part(x + 1)
            return out

    x = images(2)
    for data in (x, [x, x]):
        table = activation_statistics(Model(), data)
        assert [(row.name, row.call, row.calls) for row in table] == [("part", 0, 2), ("part", 1, 2)]
        assert table[1].mean == pytest.approx(float((x + 1).mean()), abs=1e-6)


# NaN and infinity ----------------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    """Takes the logarithm of a part of its input that is below zero in some batches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def test_the_first_layer_with_nan_in_the_order_of_execution_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU(), Breaks()), nn.BatchNorm2d(4))
    table = activation_statistics(model, images(2))
    assert table.first_nonfinite == "1.1"
    assert "NaN or infinity first in 1.1" in table.notes
    assert table["1.1"].inf > 0
    assert table["1.0"].inf == 0
    assert "NaN, Inf" in str(table).splitlines()[2]
    assert "NaN, Inf" not in str(table[:1]).splitlines()[0]


def test_the_first_batch_with_nan_decides_and_is_named() -> None:
    fine, bad = images(2).abs() + 0.1, -images(2).abs()

    model = OwnForward(lambda model, x: model.late(model.early(x)), early=nn.Identity(), late=Breaks())
    table = activation_statistics(model, [fine, bad, bad * math.nan])
    assert table.first_nonfinite == "late"
    assert "NaN or infinity first in late" in table.notes
    assert table["early"].nan == 2 * 768


def test_the_share_of_zeros_is_of_all_numbers_also_of_those_that_are_nan() -> None:
    row = activation_statistics(nn.Identity(), torch.tensor([[0.0, 1.0, math.nan, 0.0]]))[0]
    assert (row.count, row.nan, row.zero_share) == (4, 1, 0.5)
    assert row.mean == pytest.approx(1 / 3)


def test_the_layer_of_a_weight_that_is_nan_is_named() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter("down.weight")[0, 0, 0, 0] = math.nan
    table = activation_statistics(model, images(2))
    assert table.first_nonfinite == "down"
    assert "NaN or infinity first in down" in table.notes


def test_nan_from_a_function_behind_all_layers_is_not_silent() -> None:
    model = OwnForward(lambda model, x: model.head(x) * math.inf, head=nn.Linear(4, 4))
    table = activation_statistics(model, torch.randn(2, 4))
    assert table.first_nonfinite == ""
    assert "NaN or infinity first in the output" in table.notes


def test_nan_in_a_later_tensor_of_an_output_is_not_silent() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
            return x, x / 0, 1

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor, int]) -> Tensor:
            return pair[0]

    model = nn.Sequential(nn.Sequential(nn.Identity(), Pair()), First(), nn.Linear(4, 2))
    table = activation_statistics(model, torch.zeros(2, 4))
    assert table.first_nonfinite == "0.1"
    assert "NaN or infinity first in 0.1" in table.notes
    assert table["0.1"].nan == 0
    assert activation_statistics(model, torch.ones(2, 4)).first_nonfinite == "0.1"


# Data ----------------------------------------------------------------------------------------------------------------


def test_paths_pictures_shapes_and_loaders_are_data(tmp_path: Path) -> None:
    model = tiny_model()
    model.preprocess = saliency.Preprocess((16, 16), (16, 16))  # type: ignore[assignment]
    Image.new("RGB", (20, 30), "red").save(tmp_path / "a.png")
    assert activation_statistics(model, tmp_path / "a.png").images == 1
    assert activation_statistics(model, [str(tmp_path / "a.png")] * 3).images == 3
    assert activation_statistics(model, (4, 3, 16, 16)).images == 4
    loader = DataLoader(TensorDataset(images(5), torch.arange(5)), batch_size=2)
    table = activation_statistics(model, loader)
    assert (table.images, table.batches) == (5, 3)


def test_data_without_a_batch_is_an_error_that_says_so() -> None:
    with pytest.raises(ImageError, match="the data contain no batch"):
        activation_statistics(tiny_model(), iter(()))
    used = iter([images(1)])
    list(used)
    with pytest.raises(ImageError, match="used before"):
        activation_statistics(tiny_model(), used)


def test_layers_are_chosen_by_name_pattern_kind_and_module() -> None:
    model = tiny_model()
    model.add_module("spare", nn.Linear(3, 3))

    def choose(layers: Any) -> list[str]:
        return [row.name for row in activation_statistics(model, images(1), layers=layers)]

    assert choose("stem") == ["stem"]
    assert choose(["relu", "head"]) == ["relu", "relu", "head"]
    assert choose(nn.Conv2d) == ["stem", "down", "last"]
    assert choose(model.get_submodule("norm")) == ["norm"]
    assert choose("*o*") == ["norm", "down", "drop", "pool"]
    with pytest.raises(LayerError, match="the closest are stem"):
        choose("stam")
    with pytest.raises(LayerError, match="none of the 1 layers was called"):
        choose("spare")


# Nothing is kept, nothing is touched ---------------------------------------------------------------------------------


def test_no_activation_outlives_its_batch_and_many_batches_take_the_memory_of_one() -> None:
    model = tiny_model()
    alive: list[weakref.ref[Tensor]] = []
    handles = [
        module.register_forward_hook(lambda module, inputs, output: alive.append(weakref.ref(output)))
        for module in model.modules()
    ]
    most = 0

    def batches() -> Iterator[Tensor]:
        nonlocal most
        for seed in range(60):
            # Between two batches nothing of the last one is left, nor is there anything on the model.
            most = max(most, sum(each() is not None for each in alive))
            yield images(2, seed=seed)

    gc.disable()
    try:
        activation_statistics(model, batches())
    finally:
        gc.enable()
        for handle in handles:
            handle.remove()
    assert len(alive) > 500
    assert most == 0


def test_between_batches_the_model_is_the_users_own() -> None:
    model = tiny_model().train()
    state = Snapshot(model=model)
    changed: list[str] = []

    def batches() -> Iterator[Tensor]:
        for seed in range(3):
            changed.extend(state.changes())
            assert torch.is_grad_enabled()
            yield images(2, seed=seed)

    activation_statistics(model, batches())
    assert changed == []


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_model_the_data_and_the_random_states_are_left_bit_for_bit(mode: Callable[[], Any]) -> None:
    model, x = tiny_model().train(), images(3)
    model.add_module("spare", nn.Linear(3, 3))
    broken = nn.Sequential(tiny_model(), Raises(RuntimeError("on purpose"))).train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.get_parameter("stem.weight").requires_grad_(False)
    with mode():
        before = Snapshot(model=model, x=x, broken=broken)
        activation_statistics(model, [x, x])
        with pytest.raises(ModelError, match=r"Sequential\) refused an input of 3x3x16x16 .*: on purpose"):
            activation_statistics(broken, x)
        with pytest.raises(LayerError):
            activation_statistics(model, x, layers="spare")
        assert before.changes() == []


def test_an_input_that_the_model_overwrites_is_not_the_users() -> None:
    x = images(2)
    before = x.clone()
    activation_statistics(nn.Sequential(nn.ReLU(inplace=True)), x)
    assert torch.equal(x, before)


def test_statistics_of_one_model_in_many_threads_are_those_of_one() -> None:
    model = tiny_model()
    wanted = {n: activation_statistics(model, images(n)).rows for n in (1, 2, 3, 4)}
    assert in_threads(lambda n: activation_statistics(model, images(n)).rows, wanted) == wanted


# Other models --------------------------------------------------------------------------------------------------------


def test_wrapped_and_scripted_models_are_read_as_far_as_they_call_their_layers() -> None:
    model = tiny_model()
    plain = activation_statistics(model, images(2))
    assert activation_statistics(nn.DataParallel(model), images(2)).rows == plain.rows
    scripted = nn.Sequential(torch.jit.trace(model, images(1)), nn.ReLU())  # type: ignore[no-untyped-call]
    table = activation_statistics(scripted, images(2))
    assert [row.name for row in table] == ["0", "1"]  # a traced part takes hooks, those within it are never called
    assert table["0"].max == pytest.approx(plain["head"].max, rel=1e-5)
    assert table["1"].max == pytest.approx(plain["head"].max, rel=1e-5)
    with pytest.raises(LayerError, match="hooks do not run inside scripted modules"):
        activation_statistics(scripted, images(2), layers="0.*")
    with pytest.raises(LayerError, match="hooks do not run inside scripted modules"):
        activation_statistics(torch.jit.script(nn.Sequential(nn.ReLU())), images(2))


@pytest.mark.parametrize("statistics", [activation_statistics, gradient_statistics])
def test_a_model_without_numbers_is_an_error_that_says_so(statistics: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match=r"0\.weight is on the meta device and has no values"):
        statistics(nn.Sequential(nn.Linear(4, 2, device="meta")), torch.randn(2, 4))
    with pytest.raises(ModelError, match="lazy parameters"):
        statistics(nn.Sequential(nn.LazyLinear(2)), torch.randn(2, 4))


def test_inside_an_edit_the_statistics_are_those_of_the_edited_network() -> None:
    model, x = tiny_model(), images(2)
    plain = activation_statistics(model, x)
    with edit_activations(model, "stem", lambda tensor: 2 * tensor):
        edited = activation_statistics(model, x)
    assert edited["stem"].mean == pytest.approx(2 * plain["stem"].mean)
    assert edited["stem"].max == pytest.approx(2 * plain["stem"].max)
    assert edited["norm"].std > plain["norm"].std
    assert activation_statistics(model, x).rows == plain.rows


def test_a_recording_around_it_changes_no_row_and_records_its_calls() -> None:
    model, x = tiny_model(), images(2)
    plain = activation_statistics(model, x).rows
    with record(model, keep="statistics") as recording:
        assert activation_statistics(model, x).rows == plain
        assert len(recording) == len(plain)


def test_it_is_read_as_a_table() -> None:
    table = activation_statistics(tiny_model(), images(2))
    assert isinstance(table, ActivationStatistics)
    assert table.title == "Activations of TinyNet"
    assert "stem" in str(table)
    assert "<table" in table.to_html()


def test_a_model_with_a_scripted_part_has_statistics() -> None:
    script: Any = torch.jit.script
    model = nn.Sequential(nn.Linear(3, 3), script(nn.Sequential(nn.Linear(3, 3))), nn.Linear(3, 2))
    assert {row.name for row in activation_statistics(model, torch.randn(4, 3))} >= {"0", "2"}


class Beside(nn.Module):
    """Its first tensor, and beside it one of another kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        if self.kind == "meta":
            return x, x.to("meta")
        return x, x.to_sparse() if self.kind == "sparse" else x.to_sparse_csr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["sparse", "csr", "meta"])
def test_tensors_of_any_kind_may_stand_behind_the_first(kind: str) -> None:
    model = OwnForward(lambda model, x: model.beside(x)[0], beside=Beside(kind))
    found = activation_statistics(model, torch.randn(4, 3), layers="beside")
    assert [row.name for row in found] == ["beside"]
