# SPDX-License-Identifier: Apache-2.0
"""`shard=` and `average=` of one process, which is the only rank: what is refused, and what files need."""
import copy
import os
import pickle
import tempfile

from support import TestCase, main, params_of, torch
from test_shard import SHAPES, give, gradients, same_state

import dsopt
from dsopt.torch import (SGD, Adagrad, Adam, AdamW, AdamW8bit, DeepSpeedCPUAdam, FP16_Optimizer, FusedAdam, FusedLamb,
                         FusedLion, Lion)

class OneProcess(TestCase):
    def refuses(self, kind, pattern, call, *arguments, **options):
        with self.assertRaisesRegex(kind, pattern):
            call(*arguments, **options)

    def test_works_without_torch_distributed(self):
        params, others = params_of(*SHAPES), params_of(*SHAPES)
        sharded, whole = AdamW(params, shard=True, average=True), AdamW(others)
        for step in range(3):
            give(gradients(params, step), params, others)
            sharded.step()
            whole.step()
        self.assert_same(params, others)
        self.assertEqual(sharded.state_dict()["shard"], [0, 1, 1])
        same_state(sharded, whole, params, others, ranks=False)

    def test_saves_and_loads_unsharded_state(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "state.safetensors")
            params, others = params_of(*SHAPES), params_of(*SHAPES)
            optimizer, other = SGD(params, lr=0.1, momentum=0.9, nesterov=True), SGD(others, lr=1.0, momentum=0.5)
            for step in range(3):
                give(gradients(params, step), params)
                optimizer.step()
            optimizer.save(path)
            for param, source in zip(others, params):
                param.data.copy_(source.data)
            self.refuses(dsopt.Error, "is .sgd., here it is adam", Adam(others).load, path)
            other.load(path)
            group = other.param_groups[0]
            self.assertEqual([group[key] for key in ("lr", "momentum", "nesterov")], [0.1, 0.9, True])
            other = SGD(others, lr=torch.tensor(1.0), momentum=0.5)
            other.load(path)
            self.assertTrue(torch.is_tensor(other.param_groups[0]["lr"]))
            other.param_groups[0]["lr"] = 0.1
            for step in range(3, 6):
                give(gradients(params, step), params, others)
                optimizer.step()
                other.step()
                self.assert_same(params, others)

    def test_names_what_files_do_not_support(self):
        half = params_of((5,), dtype=torch.float16)
        wrapped = FusedAdam(half)
        wrapper = FP16_Optimizer(wrapped)
        for optimizer, pattern in (
            (wrapped, "FusedAdam: save is not supported in FP16_Optimizer; use state_dict"),
            (AdamW(params_of((5,), dtype=torch.float64)), "save needs one engine for all parameters"),
            (AdamW([torch.nn.Parameter(torch.zeros(3, 4).t())]), "is not contiguous, and files are in row-major"),
        ):
            self.refuses(NotImplementedError, pattern, optimizer.save, "/nonexistent/file")
        del wrapper
        self.refuses(OSError, "nonexistent", AdamW(params_of((5,))).save, "/nonexistent/file")
        self.refuses(OSError, "nonexistent", AdamW(params_of((5,))).load, ["/nonexistent/file"])

    def test_refuses_arguments_without_effect(self):
        params = params_of((5,))
        unsupported = NotImplementedError
        for kind in (AdamW, Lion, SGD, Adagrad, FusedAdam, FusedLion, FusedLamb, DeepSpeedCPUAdam, AdamW8bit):
            name = kind.__name__
            self.refuses(unsupported, name + ": group has no effect without shard or average", kind, params, group=1)
            self.refuses(unsupported, name + ": node_group has no effect", kind, params, node_group=1)
            self.refuses(unsupported, name + ": check_ranks has no effect", kind, params, check_ranks=True)
            self.refuses(ValueError, name + ": shard is 'data', and must be False, True or 'node'", kind, params,
                         shard="data")
            self.refuses(ValueError, name + ": shard='node' needs node_group", kind, params, shard="node")
            if kind is not FusedLamb:
                self.refuses(unsupported, name + ": max_grad_norm has no effect without average=True", kind, params,
                             shard=True, max_grad_norm=1.0)
                self.refuses(ValueError, name + ": max_grad_norm is -1", kind, params, average=True, max_grad_norm=-1)
        for kind in (FusedAdam, FusedLamb):
            self.refuses(unsupported, "shard is not supported with compat='deepspeed'", kind, params, shard=True,
                         compat="deepspeed")

    def test_refuses_what_one_engine_cannot_step(self):
        double, = params_of((5,), dtype=torch.float64)
        for argument in ("shard", "average"):
            optimizer = AdamW([double], **{argument: True})
            double.grad = torch.zeros_like(double)
            self.refuses(NotImplementedError, "float64, which is stepped .* not supported with " + argument,
                         optimizer.step)
            params = params_of((5,), (6,), dtype=torch.bfloat16)
            groups = [{"params": params[:1], "stochastic_rounding": True}, {"params": params[1:]}]
            optimizer = AdamW(groups, **{argument: True})
            give(gradients(params, 1), params)
            self.refuses(NotImplementedError, "AdamW with %s steps all parameters in one engine" % argument,
                         optimizer.step)
            half = params_of((5,), dtype=torch.float16)
            self.refuses(NotImplementedError, "FusedAdam with %s is not supported in FP16_Optimizer" % argument,
                         FP16_Optimizer, FusedAdam(half, **{argument: True}))

    def test_refuses_subgroups(self):
        param, = params_of((5,))
        give(gradients([param], 1), [param])
        optimizer = DeepSpeedCPUAdam([param], average=True)
        self.refuses(NotImplementedError, r"step_subgroup\(3\) is not supported with shard or average",
                     optimizer.step_subgroup, 3)

    def test_refuses_copies_and_pickles(self):
        optimizer = AdamW(params_of((5,)), shard=True)
        for call in (pickle.dumps, copy.deepcopy):
            self.refuses(dsopt.StateError, "AdamW with shard or average cannot be pickled or copied", call, optimizer)

    def test_refuses_parameters_once_there_is_state(self):
        for kind, options in ((AdamW, {}), (SGD, {"lr": 0.1}), (Lion, {})):
            first, second, frozen = params_of((9000,), (5,), (6,))
            frozen.requires_grad_(False)
            optimizer = kind([first, frozen], shard=True, **options)
            give(gradients([first], 1), [first])
            optimizer.step()
            frozen.requires_grad_(True)
            self.refuses(dsopt.StateError, r"\['params'\]\[1\] has no state, and other parameters have", optimizer.step)
            frozen.requires_grad_(False)
            optimizer.step()
            optimizer.add_param_group({"params": [second]})
            self.refuses(dsopt.StateError, r"param_groups\[1\]\['params'\]\[0\] has no state", optimizer.step)

    def test_continues_dampened_momentum_of_absent_gradients(self):
        params, others = params_of((9000,), (5,)), params_of((9000,), (5,))
        options = dict(lr=0.1, momentum=0.9, dampening=0.5)
        sharded, whole = SGD(params, shard=True, **options), SGD(others, **options)
        for step in range(4):
            grads = gradients(params, step)
            give([grads[0], None if step < 2 else grads[1]], params, others)
            sharded.load_state_dict(copy.deepcopy(sharded.state_dict()))
            sharded.step()
            whole.step()
            self.assert_same(params, others)

    def test_names_a_part_of_another_length(self):
        params = params_of((9000,))
        optimizer = AdamW(params, shard=True)
        give(gradients(params, 1), params)
        optimizer.step()
        optimizer.state[params[0]]["exp_avg"] = torch.zeros(8999)
        self.refuses(ValueError, r"has shape \(8999,\), and this rank's part \(9000,\)", optimizer.step)


if __name__ == "__main__":
    main()
