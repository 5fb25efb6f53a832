# SPDX-License-Identifier: Apache-2.0
"""Cases of test_dtensor_trainers.py: accelerate with FSDP2, and Lightning's ModelParallelStrategy, compared with
torch.optim. Each case trains, saves, loads into a new model, and resumes."""
import contextlib
import os
import shutil
import tempfile

import torch
from dtensors import DTensor, Replicate, assert_equal, random, shard_model, whole

import dsopt.torch

STEPS = 4


def of_launcher(rank):
    """Returns the variables of torchrun. The process group already exists, so the port is not used."""
    ranks = str(torch.distributed.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks,
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


@contextlib.contextmanager
def common_folder(rank):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    yield folder[0]
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))


def assert_trained(params, optimizer, others, theirs, steps):
    """Asserts the same results as with torch.optim, and that the state is sharded."""
    for param, other in zip(params, others):
        assert isinstance(param, DTensor) and len(optimizer.state[param]) == 3
        torch.testing.assert_close(whole(param), whole(other))
        for name, value in optimizer.state[param].items():
            torch.testing.assert_close(whole(value), whole(theirs.state[other][name]))
            assert value.item() == steps if name == "step" else value.placements == param.placements, name


# accelerate
def accelerated(kind):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    for shared in (PartialState, AcceleratorState):
        shared._reset_state()
    accelerator = Accelerator(cpu=True)
    # accelerate 1.15 supports FSDP only on devices other than the CPU.
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, cpu_ram_efficient_loading=False)
    assert accelerator.is_fsdp2
    net = model()
    return (accelerator, *accelerator.prepare(net, kind(net.parameters(), lr=0.02)))


def accelerate_with_fsdp2(rank):
    of_launcher(rank)

    def train(accelerator, net, optimizer, begin):
        for step in range(begin, begin + STEPS):
            optimizer.zero_grad()
            accelerator.backward(net(random((8, 6), 10 * step + rank)).square().mean())
            accelerator.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()

    with common_folder(rank) as folder:
        runs = []
        for name, kind in (("dsopt", dsopt.torch.AdamW), ("torch", torch.optim.AdamW)):
            accelerator, net, optimizer = accelerated(kind)
            train(accelerator, net, optimizer, 0)
            accelerator.save_state(os.path.join(folder, name))
            train(accelerator, net, optimizer, STEPS)
            runs.append((list(net.parameters()), optimizer.optimizer))
        assert_trained(*runs[0], *runs[1], 2 * STEPS)
        for name, kind in (("dsopt", dsopt.torch.AdamW), ("torch", dsopt.torch.AdamW)):
            accelerator, net, optimizer = accelerated(kind)
            accelerator.load_state(os.path.join(folder, name))
            train(accelerator, net, optimizer, STEPS)
            assert_trained(list(net.parameters()), optimizer.optimizer, *runs[1], 2 * STEPS)
            for param, other in zip(net.parameters(), runs[0][0]) if name == "dsopt" else ():
                assert_equal(whole(param), whole(other), "after a load")


# Lightning
def lightning_with_model_parallel_strategy(rank):
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    of_launcher(rank)
    ranks = torch.distributed.get_world_size()

    class Module(lightning.LightningModule):
        def __init__(self, kind):
            super().__init__()
            self.kind, self.net = kind, model()

        def configure_model(self):
            if self.device_mesh["tensor_parallel"].size() > 1:
                parallelize_module(self.net[0], self.device_mesh["tensor_parallel"],
                                   ColwiseParallel(output_layouts=Replicate()))
            shard_model(self.net, self.device_mesh["data_parallel"])

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return self.kind(self.parameters(), lr=0.02)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(random((4 * STEPS * ranks, 6), 3), batch_size=4)

    def fit(kind, data_parallel, folder, epochs, load=None):
        strategy = ModelParallelStrategy(data_parallel_size=data_parallel, tensor_parallel_size=ranks // data_parallel)
        trainer = lightning.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=epochs,
                                    logger=False, enable_progress_bar=False, enable_model_summary=False,
                                    enable_checkpointing=False, default_root_dir=folder,
                                    plugins=[TorchElasticEnvironment()])
        module = Module(kind)
        trainer.fit(module, ckpt_path=load)
        optimizer, = trainer.optimizers
        return trainer, list(module.parameters()), getattr(optimizer, "optimizer", optimizer)

    with common_folder(rank) as folder:
        for data_parallel in sorted({ranks, ranks // 2}):
            first = os.path.join(folder, "of%d" % data_parallel)
            trainer, *_ = fit(dsopt.torch.AdamW, data_parallel, folder, 1)
            trainer.save_checkpoint(first)
            trainer, params, optimizer = fit(dsopt.torch.AdamW, data_parallel, folder, 2, first)
            _, others, theirs = fit(torch.optim.AdamW, data_parallel, folder, 2)
            assert_trained(params, optimizer, others, theirs, trainer.global_step)
            _, whole_run, _ = fit(dsopt.torch.AdamW, data_parallel, folder, 2)
            for param, other in zip(params, whole_run):
                assert_equal(whole(param), whole(other), "after a load")
