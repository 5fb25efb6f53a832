# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by the tests of DTensors: parameters in many layouts, each with a whole copy for an unsharded
optimizer."""
import torch
import torch.distributed as dist
from support import VERSION

try:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    ABSENT = ""
except ImportError as problem:
    ABSENT = "torch %s has no FSDP2 or no torch.distributed.tensor (%s)" % (torch.__version__, problem)
if not ABSENT and VERSION < (2, 8):
    ABSENT = "FSDP2 of torch %s averages with ReduceOp.AVG, which gloo does not have" % torch.__version__
if not ABSENT and not dist.is_gloo_available():
    ABSENT = "torch is built without gloo"


def whole(tensor):
    """Returns the whole tensor of a DTensor. Collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def random(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def place(tensor, mesh, placements):
    """Returns a DTensor of a tensor that every rank has. Does not communicate."""
    here = DTensor.from_local(tensor.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return here.redistribute(placements=placements)


def line():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("line",))


def square():
    """Returns a mesh of two dims: 2 x 2, or 1 x 2 with two ranks."""
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("row", "column"))


def layouts():
    """Returns shape, mesh and placements: uneven and empty shards, copies, several mesh dims, and plain tensors."""
    one, two = line(), square()
    column = two["column"]
    return [
        ((10, 5), one, [Shard(0)]), ((1,), one, [Shard(0)]), ((3, 2), one, [Shard(0)]), ((5,), one, [Shard(0)]),
        ((6, 7), one, [Shard(1)]), ((7,), one, [Replicate()]), ((), one, [Replicate()]), ((0, 3), one, [Shard(0)]),
        ((9, 4), two, [Replicate(), Shard(0)]), ((9, 5), two, [Shard(0), Shard(1)]), ((11,), two, [Shard(0), Shard(0)]),
        ((4, 3), two, [Shard(1), Replicate()]), ((4,), two, [Replicate(), Replicate()]),
        ((7, 3), column, [Shard(0)]), ((2, 3), column, [Replicate()]), ((6,), None, None), ((300, 7), one, [Shard(0)]),
    ]


class Twins:
    """Parameters in some layouts, and whole ones with equal values."""

    def __init__(self, layouts, dtype=torch.float32, leave_out=0):
        self.layouts = layouts
        values = [random(shape, 7 + i, dtype) for i, (shape, _, _) in enumerate(layouts)]
        self.whole = [torch.nn.Parameter(value.clone()) for value in values]
        self.params = [torch.nn.Parameter(value.clone() if mesh is None else place(value, mesh, placements))
                       for value, (_, mesh, placements) in zip(values, layouts)]
        self.leave_out, self.count = leave_out, 0

    def give_grads(self, scale=1.0):
        """Sets equal gradients. One of the `leave_out` parameters has none."""
        self.count += 1
        for i, (param, other, (shape, mesh, placements)) in enumerate(zip(self.params, self.whole, self.layouts)):
            if self.leave_out and (i + self.count) % self.leave_out == 0:
                param.grad = other.grad = None
                continue
            grad = random(shape, 1000 * self.count + i, param.dtype) * scale
            other.grad = grad
            param.grad = grad.clone() if mesh is None else place(grad, mesh, placements)

    def assert_params(self, what, **tolerance):
        for i, (param, other) in enumerate(zip(self.params, self.whole)):
            assert_equal(whole(param), other.detach(), "%s: parameter %d %s" % (what, i, self.layouts[i]), **tolerance)

    def assert_states(self, what, optimizer, other, **tolerance):
        for i, (param, its) in enumerate(zip(self.params, self.whole)):
            state, expected = optimizer.state.get(param, {}), other.state.get(its, {})
            assert set(state) == set(expected), (what, i, set(state), set(expected))
            for name, value in state.items():
                about = "%s: %s of parameter %d %s" % (what, name, i, self.layouts[i])
                if isinstance(param, DTensor) and name != "step":
                    assert isinstance(value, DTensor), about
                    assert (value.device_mesh, value.placements) == (param.device_mesh, param.placements), about
                    assert value.shape == param.shape and value.stride() == param.stride(), about
                else:
                    assert not isinstance(value, DTensor), about
                assert_equal(whole(value), expected[name], about, **tolerance)


def assert_equal(value, expected, what, relative=None):
    """Asserts the same bits or, with `relative`, a maximal difference relative to the largest element."""
    assert value.shape == expected.shape and value.dtype == expected.dtype, (what, value.shape, expected.shape)
    if relative is None:
        assert torch.equal(value, expected), "%s differs by %g" % (what, (value - expected).abs().max())
    elif value.numel():
        error = (value - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
        assert error <= relative, "%s differs by %g" % (what, error)


def raises(kind, pattern, function, *arguments, **options):
    """Asserts that `function` raises: unittest's assertRaisesRegex for a rank's process."""
    import re
    try:
        function(*arguments, **options)
    except kind as problem:
        assert re.search(pattern, str(problem)), "%r is not in: %s" % (pattern, problem)
        return
    raise AssertionError("no %s: %s" % (kind.__name__, pattern))


def shard_model(model, mesh, **options):
    """Applies fully_shard to each Linear, and to the rest."""
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def mlp(dtype=torch.float32, widths=(6, 33, 1, 5)):
    """Returns a model in which one layer has a single row: with several ranks all but one have an empty shard."""
    torch.manual_seed(0)
    layers = []
    for a, b in zip(widths, widths[1:]):
        layers += [torch.nn.Linear(a, b), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1]).to(dtype)


def batch(step, rank, width=6):
    x = random((8, width), 100 * step + rank)
    return x, x[:, :1] * x[:, 1:2]


__all__ = [name for name in globals() if not name.startswith("_")]
