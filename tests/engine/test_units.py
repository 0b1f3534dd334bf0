"""Which modules become units and roots; no process group, most models on meta."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memwall_strategy.core.errors import ConfigError
from memwall_strategy.engine.units import ShardPlan, plan_sharding, unit_class_names


@pytest.fixture(autouse=True)
def meta():
    with torch.device("meta"):
        yield


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.down(self.up(x))


class Other(Block):
    pass


class Net(nn.Module):
    def __init__(self, *blocks, **modules):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks or [Block(), Block(), Block()])
        self.head = nn.Linear(4, 4)
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Task(nn.Module):
    """Stands for a LightningModule: its own ``forward`` is not what runs."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return x


def plan(model, *classes, split=False, low_precision=False) -> ShardPlan:
    return plan_sharding(model, unit_classes=classes, split=split, low_precision=low_precision)


def names(pairs):
    return [name for name, _ in pairs]


# -- classes --


@pytest.mark.parametrize(
    ("model", "block"), [("GPT2LMHeadModel", "transformer.h.0"), ("LlamaForCausalLM", "model.layers.0")]
)
def test_hugging_face_models_say_so_themselves(model, block):
    transformers = pytest.importorskip("transformers")
    tiny = {
        "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=11),
        "LlamaForCausalLM": lambda: transformers.LlamaConfig(
            num_hidden_layers=3, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, vocab_size=11,
            intermediate_size=16,
        ),
    }[model]()  # fmt: skip
    found = plan(getattr(transformers, model)(tiny))
    assert names(found.units) == [block.replace("0", str(i)) for i in range(3)]
    assert names(found.roots) == [""]
    assert not found.crown


def test_the_longest_repetition_wins():
    model = Net(Block(), Block(), others=nn.ModuleList([Other(), Other(), Other()]))
    assert unit_class_names(model) == ("Other",)
    assert names(plan(model).units) == ["others.0", "others.1", "others.2"]


def test_a_sequential_counts_as_a_repetition():
    assert names(plan(nn.Sequential(Block(), nn.ReLU(), Block())).units) == ["0", "2"]


def test_the_class_most_often_in_the_list_wins():
    model = Net(Block(), Other(), Block())
    assert names(plan(model).units) == ["blocks.0", "blocks.2"]


@pytest.mark.parametrize("model", [lambda: nn.Linear(4, 4), lambda: Net(Block()), lambda: nn.Sequential(nn.ReLU())])
def test_no_repetition_names_no_class(model):
    assert unit_class_names(model()) == ()


def test_lists_of_what_has_no_parameters_or_no_forward_do_not_count():
    lists = nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block()]), nn.ModuleList([Block()])])
    model = Net(Block(), Block(), acts=nn.ModuleList([nn.ReLU()] * 5), lists=lists)
    assert unit_class_names(model) == ("Block",)
    assert names(plan(model).units) == ["blocks.0", "blocks.1", "lists.0.0", "lists.1.0", "lists.2.0"]


def test_declared_classes_that_are_not_there_are_passed_over():
    model = Net()
    model._no_split_modules = ["Missing"]
    assert unit_class_names(model) == ("Block",)
    model._no_split_modules = {"Missing", "Linear"}
    assert unit_class_names(model) == ("Linear",)


def test_classes_by_name_whatever_repeats():
    model = Net(Block(), Block(), extra=Other())
    assert names(plan(model, "Other").units) == ["extra"]
    assert names(plan(model, "Other", "Block").units) == ["blocks.0", "blocks.1", "extra"]


def test_units_are_the_outermost():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block()

        def forward(self, x):
            return self.inner(x)

    assert names(plan(Net(Outer(), Outer())).units) == ["blocks.0", "blocks.1"]
    with pytest.raises(ConfigError, match="'Block', which is nested in another unit class of Net"):
        plan(Net(Outer(), Outer()), "Outer", "Block")


def test_a_shared_module_is_one_unit():
    block = Block()
    assert names(plan(Net(block, block, Block())).units) == ["blocks.0", "blocks.2"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Blok",
            r"'Blok', which is no class of a module with parameters of Net.*Did you mean 'Block'\?.*Block, Linear",
        ),
        ("ModuleList", "'ModuleList', which is no class"),  # a container without forward cannot be hooked
        ("ReLU", "'ReLU', which is no class"),
    ],
)
def test_a_class_that_cannot_be_a_unit_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        plan(Net(act=nn.ReLU()), name)


def test_the_model_itself_is_never_a_unit_of_itself():
    with pytest.raises(ConfigError, match="'Net'"):
        plan(Net(), "Net")


@pytest.mark.parametrize("model", [nn.Module, lambda: Task(act=nn.ReLU())])
def test_nothing_to_shard_is_refused(model):
    with pytest.raises(ConfigError, match="has no parameters"):
        plan(model(), split=True)


# -- roots --


def test_a_plain_model_is_its_own_root():
    found = plan(Net())
    assert (names(found.roots), found.crown) == ([""], False)


def test_children_of_a_lightning_module_are_roots():
    found = plan(Task(encoder=Net(), decoder=Net(), act=nn.ReLU()), split=True)
    assert names(found.roots) == ["encoder", "decoder"]
    assert names(found.units) == [f"{net}.blocks.{i}" for net in ("encoder", "decoder") for i in range(3)]
    assert not found.crown


def test_parameters_directly_on_the_module_make_it_the_root():
    task = Task(net=Net())
    task.scale = nn.Parameter(torch.ones(1))
    assert names(plan(task, split=True).roots) == [""]


def test_weights_tied_across_children_make_the_module_the_root():
    task = Task(embed=nn.Embedding(5, 4), net=Net(), head=nn.Linear(4, 5))
    task.head.weight = task.embed.weight
    found = plan(task, split=True)
    assert names(found.roots) == [""]
    assert names(found.units) == ["net.blocks.0", "net.blocks.1", "net.blocks.2"]


def test_containers_are_looked_into_for_roots():
    task = Task(nets=nn.ModuleDict({"a": Net(), "b": Other()}), weights=nn.ModuleList([nn.Linear(4, 4)]))
    assert names(plan(task, split=True).roots) == ["nets.a", "nets.b", "weights.0"]


def test_parameters_of_a_container_make_the_module_the_root():
    task = Task(net=Net(), extra=nn.ParameterList([nn.Parameter(torch.ones(2))]))
    assert names(plan(task, split=True).roots) == [""]


def test_blocks_that_training_step_calls_itself_are_crowned():
    """The module over them prefetches across them; what is no block stays a root below the crown."""
    task = Task(stem=nn.Linear(4, 4), blocks=nn.ModuleList([Block(), Block(), Block()]), head=nn.Linear(4, 4))
    found = plan(task, split=True)
    assert found.crown
    assert names(found.units) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(found.roots) == ["stem", "head"]


def test_one_loose_block_is_a_root_like_any_other():
    found = plan(Task(net=Net(), extra=Block()), "Block", split=True)
    assert not found.crown
    assert names(found.roots) == ["net", "extra"]
    assert "extra" not in names(found.units)


def test_every_module_is_in_one_list_only():
    task = Task(stem=nn.Linear(4, 4), blocks=nn.ModuleList([Block(), Block()]), net=Net())
    for classes in ((), ("Block",), ("Linear",)):
        found = plan(task, *classes, split=True)
        everything = [m for _, m in (*found.units, *found.roots, *found.apart)]
        assert len({id(m) for m in everything}) == len(everything), classes


# -- weights that two groups would share --


def tied(where):
    model = Net()
    if where == "two units":
        model.blocks[2].up.weight = model.blocks[0].up.weight
    elif where == "a unit and the root":
        model.head.weight = model.blocks[2].up.weight
    else:
        model.blocks[2].up = model.blocks[0].up
    return model


@pytest.mark.parametrize("where", ["two units", "a unit and the root", "a shared module"])
def test_chosen_units_that_share_a_weight_are_refused(where):
    """FSDP2 would gather one after the other, each its own copy."""
    with pytest.raises(
        ConfigError, match=r"blocks\.\d\.up\.weight.* are one weight, but lie in different units \(blocks\."
    ):
        plan(tied(where), "Block")


@pytest.mark.parametrize("where", ["two units", "a unit and the root", "a shared module"])
def test_found_units_that_share_a_weight_go_to_the_root_with_a_warning(where):
    model = tied(where)
    with pytest.warns(UserWarning, match="are one weight.*gathered with their root"):
        found = plan(model)
    left = ["blocks.0", "blocks.1"] if where == "a unit and the root" else ["blocks.1"]
    assert names(found.units) == left
    assert names(found.roots) == [""]


def test_weights_tied_inside_a_unit_or_inside_the_root_are_fine():
    model = Net()
    model.head.weight = model.stem.weight
    model.blocks[0].up.weight = model.blocks[0].down.weight
    assert len(plan(model).units) == 3


# -- modules apart --


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


def test_running_statistics_stand_apart_under_low_precision_only():
    model = Net(Normed(), Normed(), last=nn.BatchNorm1d(4))
    assert names(plan(model).apart) == []
    assert names(plan(model, low_precision=True).apart) == ["blocks.0.norm", "blocks.1.norm", "last"]


def test_a_batch_norm_that_is_a_unit_already_does_not_stand_apart():
    model = Net(Normed(), Normed())
    found = plan(model, "BatchNorm1d", low_precision=True)
    assert names(found.units) == ["blocks.0.norm", "blocks.1.norm"]
    assert names(found.apart) == []


def test_statistics_without_weights_have_nothing_to_gather():
    model = Net(Block(), Block(), norm=nn.BatchNorm1d(4, affine=False))
    assert names(plan(model, low_precision=True).apart) == []


def test_a_module_of_another_dtype_stands_apart():
    model = Net()
    model.blocks[1].extra = nn.Linear(4, 1, dtype=torch.bfloat16)
    model.last = nn.Linear(4, 1, dtype=torch.float64)
    assert names(plan(model).apart) == ["blocks.1.extra", "last"]


def test_the_dtype_of_most_weights_stays():
    model = Net()
    model.blocks[1].to(torch.bfloat16)
    model.blocks[1].down.to(torch.float32)
    model.blocks[1].extra = nn.Linear(4, 40, dtype=torch.bfloat16)
    assert names(plan(model).apart) == ["blocks.1.down"]


def test_frozen_weights_of_another_dtype_may_stay():
    """Only what is reduced together needs one dtype."""
    model = Net()
    model.blocks[1].up.to(torch.bfloat16).requires_grad_(False)
    assert names(plan(model).apart) == []


def test_several_dtypes_in_one_module_are_refused():
    model = Net()
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"blocks\.1\.up mixes parameters of several dtypes \(torch\.bfloat16, "):
        plan(model)


def test_a_parameter_of_another_dtype_directly_on_a_unit_is_refused():
    model = Net()
    model.blocks[1].gain = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"blocks\.1 mixes parameters of several dtypes"):
        plan(model)
