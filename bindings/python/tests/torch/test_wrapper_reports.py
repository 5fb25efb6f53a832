# SPDX-License-Identifier: Apache-2.0
"""Reports of the wrappers about steps: the log, timers, phase_times."""
import logging
import math
import sys
import time
import unittest
from unittest import mock

from support import TestCase, child, main, params_of, run_ranks, torch

import dsopt
from dsopt.torch import FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb, OnebitAdam, OnebitLamb, ZeroOneAdam

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
SHAPES = ((7, 3), (5,))
EVERY = ((FusedAdam, {}), (FusedLamb, {}), (OnebitAdam, {"freeze_step": 2}), (ZeroOneAdam, {"var_freeze_step": 2}),
         (OnebitLamb, {"freeze_step": 2}))
OVERFLOW = ["compute_norm", "overflow_check"]
STEP = OVERFLOW + ["unscale_and_clip", "basic_step", "update_fp16"]


class Recorder:
    """Timers that only start and stop."""

    def __init__(self):
        self.calls, self.logged = [], []

    class Timer:
        def __init__(self, name, calls):
            self.name, self.calls = name, calls

        def start(self):
            self.calls.append((self.name, "start"))

        def stop(self):
            self.calls.append((self.name, "stop"))

    def __call__(self, name):
        return self.Timer(name, self.calls)

    def log(self, names):
        self.logged.append(names)


class Wall:
    """The part of DeepSpeed 0.19.6's SynchronizedWallClockTimer that uses lists."""

    class Timer:
        def __init__(self, host):
            self.use_host_timer, self.event_timers, self.started_ = host, [], False

        def start(self):
            self.started_ = True

        def stop(self):
            self.started_ = False

        def elapsed(self):
            if self.use_host_timer:
                return sum(seconds * 1000 for seconds in self.event_timers)
            return sum(event.get_elapsed_msec() for event in self.event_timers)

    def __init__(self, host):
        self.host, self.timers, self.logged = host, {}, []

    def __call__(self, name):
        return self.timers.setdefault(name, self.Timer(self.host))

    def log(self, names):
        self.logged.append({name: self.timers[name].elapsed() for name in names if name in self.timers})
        for timer in self.timers.values():
            timer.event_timers.clear()


class Noop:
    """DeepSpeed's NoopTimer: one timer for all names."""

    class Timer:
        def start(self):
            pass

        stop = start

    def __init__(self):
        self.timer, self.logged = self.Timer(), []

    def __call__(self, name):
        return self.timer

    def log(self, names):
        self.logged.append(names)


class Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def one_rank_logs(rank):
    """Ranks with different log levels send each other the same messages. With timers on all ranks, basic_step includes
    the
    times of compression and exchange."""
    messages, log = Messages(), logging.getLogger("dsopt")
    log.addHandler(messages)
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for kind, options in EVERY[2:]:
        for timers in (None, Wall(True)):
            params = params_of(*SHAPES, dtype=torch.float16)
            optimizer = FP16_Optimizer(kind(params, lr=0.01, **options), dynamic_loss_scale=True, timers=timers,
                                       dynamic_loss_args={"init_scale": 64.0})
            messages.texts.clear()
            for i in range(8):
                generator = torch.Generator().manual_seed(8 * rank + i)
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator).half()
                    if i == 6 and rank == 1:
                        p.grad.fill_(math.nan)
                assert optimizer.step() == (i == 6)
                assert timers is None or optimizer.phase_times()["basic_step"] > 0
            assert len(messages.texts) == 1 - rank, messages.texts
            assert all("peer); the loss scale changed from 64 to 32" in text for text in messages.texts), messages.texts
    log.removeHandler(messages)


def one_rank_sets_equal_values(rank):
    """Setting clip_grad and timers to equal values must not create a new plan, whose first step has one more
    collective."""
    for kind, options in EVERY[2:]:
        params, timers = params_of(*SHAPES, dtype=torch.float16), Wall(True)
        optimizer = FP16_Optimizer(kind(params, lr=0.01, **options), timers=timers, clip_grad=1.0)
        for i in range(8):
            for p in params:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(8 * rank + i)).half()
            if rank == 0 and i in (1, 5):
                optimizer.clip_grad = 1
                optimizer.timers = timers
            assert not optimizer.step()


class Reports(TestCase):
    @unittest.skipUnless(GLOO, "torch is built without gloo")
    def test_ranks_may_report_differently(self):
        run_ranks(self, __file__, "all")

    def make(self, wrapper, kind=FusedAdam, options=None, dtype=torch.float16, **more):
        params = params_of(*SHAPES, dtype=dtype)
        more.setdefault("dynamic_loss_scale", True)
        more.setdefault("dynamic_loss_args", {"init_scale": 2.0 ** 10, "scale_window": 3})
        return params, wrapper(kind(params, lr=0.01, **(options or {})), low_precision_dtype=dtype, **more)

    def step(self, params, optimizer, seed=0, bad=None):
        generator = torch.Generator().manual_seed(seed)
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            if i == bad:
                p.grad.fill_(math.inf)
        return optimizer.step()

    def test_log_has_skipped_steps_and_changes_of_the_scale(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            for compat in (None, "deepspeed"):
                params, optimizer = self.make(wrapper, options={"compat": compat})
                with self.assertLogs("dsopt", logging.INFO) as logs:
                    for i in range(8):
                        self.step(params, optimizer, i, bad=1 if i == 6 else None)
                grown, skipped = [record.getMessage() for record in logs.records]
                self.assertEqual(grown, "the loss scale changed from 1024 to 2048")
                self.assertRegex(skipped, r"^skipped a step \(gradients.*; not finite: param_groups\[0\]\['params'\]"
                                 r"\[1\]\); the loss scale changed from 2048 to 1024$")
                self.assertEqual({record.levelno for record in logs.records}, {logging.INFO})

    def test_log_without_a_dynamic_scale_has_skipped_steps(self):
        for options, text in ((dict(dynamic_loss_scale=False, dynamic_loss_args=None, static_loss_scale=8.0),
                               "^skipped a step .*; the loss scale is 8$"),
                              (dict(dtype=torch.bfloat16), "^skipped a step .*; the loss scale is 1$")):
            params, optimizer = self.make(FP16_UnfusedOptimizer, options={"compat": "deepspeed"}, **options)
            with self.assertLogs("dsopt", logging.INFO) as logs:
                self.step(params, optimizer, bad=0)
            (record, ) = logs.records
            self.assertRegex(record.getMessage(), text)

    def test_scale_set_by_the_caller_is_not_logged(self):
        params, optimizer = self.make(FP16_Optimizer)
        with self.assertLogs("dsopt", logging.INFO) as logs:
            self.step(params, optimizer)
            optimizer.loss_scale = 64.0
            self.step(params, optimizer)
            self.step(params, optimizer, bad=0)
        self.assertEqual([record.getMessage().split("; ")[-1] for record in logs.records],
                         ["the loss scale changed from 64 to 32"])

    def test_overrides_are_logged(self):
        for compat in (None, "deepspeed"):
            params, optimizer = self.make(FP16_Optimizer, options={"compat": compat})
            with self.assertLogs("dsopt", logging.INFO) as logs:
                for scale in (4.0, 4.0, None):
                    optimizer.override_loss_scale(scale)
                    self.step(params, optimizer)
            self.assertEqual([record.getMessage() for record in logs.records],
                             ["the override of the loss scale changed from None to 4.0",
                              "the override of the loss scale changed from 4.0 to None"])

    def test_without_verbose_nothing_is_logged(self):
        params, optimizer = self.make(FP16_Optimizer, verbose=False)
        with self.assertLogs("dsopt", logging.INFO) as logs:
            logging.getLogger("dsopt").info("nothing else")
            optimizer.override_loss_scale(4.0)
            self.step(params, optimizer, bad=0)
        self.assertEqual(len(logs.records), 1)

    def test_deepspeed_timers_receive_the_phases(self):
        for host in (True, False):
            timers = Wall(host)
            params, optimizer = self.make(FP16_Optimizer, timers=timers, clip_grad=1.0)
            begin = time.perf_counter()
            for i in range(3):
                self.step(params, optimizer, i, bad=0 if i == 1 else None)
            spent = (time.perf_counter() - begin) * 1000
            self.assertEqual([sorted(log) for log in timers.logged], [sorted(STEP), sorted(OVERFLOW), sorted(STEP)])
            self.assertGreater(timers.logged[0]["basic_step"], 0)
            self.assertGreater(timers.logged[0]["overflow_check"], 0)
            self.assertEqual(timers.logged[0]["update_fp16"], 0)
            self.assertLess(sum(sum(log.values()) for log in timers.logged), spent)
            self.assertTrue(any(optimizer.phase_times().values()))
            self.assertEqual(list(optimizer.phase_times()), STEP)

    def test_other_timers_are_started_and_stopped(self):
        timers = Recorder()
        params, optimizer = self.make(FP16_Optimizer, timers=timers)
        self.step(params, optimizer)
        self.assertEqual(timers.calls[:2], [("basic_step", "start"), ("basic_step", "stop")])
        for name in STEP:
            self.assertEqual([what for passed, what in timers.calls if passed == name], ["start", "stop"], name)
        self.assertGreater(optimizer.phase_times()["basic_step"], 0)
        self.step(params, optimizer, bad=0)
        self.assertEqual(timers.logged, [STEP, OVERFLOW])

    def test_report_is_kept_until_the_next_step(self):
        def clip(params, optimizer):
            optimizer.clip_grad = 0.5

        def measure(params, optimizer):
            optimizer.timers = None if optimizer.timers else Wall(True)

        def load(params, optimizer):
            optimizer.load_state_dict(optimizer.state_dict())

        def add(params, optimizer):
            optimizer.optimizer.add_param_group({"params": params_of((2, ), dtype=torch.float16)})

        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            for change in (clip, measure, load, add):
                params, optimizer = self.make(wrapper, clip_grad=1.0)
                self.assertTrue(self.step(params, optimizer, bad=0))
                change(params, optimizer)
                self.assertTrue(optimizer.overflow, change)
                self.assertFalse(self.step(params, optimizer))
                norm = optimizer._global_grad_norm
                self.assertGreater(norm, 0)
                change(params, optimizer)
                self.assertFalse(optimizer.overflow, change)
                self.assertEqual(optimizer._global_grad_norm, norm, change)

    def test_noop_timers_measure_nothing(self):
        params, optimizer = self.make(FP16_Optimizer, timers=Noop())
        self.step(params, optimizer)
        with self.assertRaisesRegex(dsopt.StateError, "timers"):
            optimizer.phase_times()
        optimizer.timers = Wall(True)
        self.step(params, optimizer)
        self.assertGreater(optimizer.phase_times()["basic_step"], 0)

    def test_failed_step_stops_the_timer(self):
        timers = Recorder()
        params, optimizer = self.make(FP16_Optimizer, timers=timers)
        params[0].grad = torch.ones(7, 3, dtype=torch.float16).to_sparse()
        with self.assertRaisesRegex(RuntimeError, "sparse"):
            optimizer.step()
        self.assertEqual(timers.calls, [("basic_step", "start"), ("basic_step", "stop")])

    def test_step_checks_changes_once_and_reads_one_report(self):
        for wrapper, name in ((FP16_Optimizer, "step"), (FP16_Optimizer, "step_fused_adam"),
                              (FP16_UnfusedOptimizer, "step"), (FP16_UnfusedOptimizer, "step_fused_lamb")):
            for kind, options in EVERY:
                for timers in (None, Wall(True)) if wrapper is FP16_Optimizer else (None, ):
                    params, optimizer = self.make(wrapper, kind, options, clip_grad=1.0,
                                                  **({"timers": timers} if timers else {}))
                    self.step(params, optimizer)
                    inner, step = optimizer.optimizer, getattr(optimizer, name)
                    for bad in (False, True):
                        for p in params:
                            p.grad = torch.full_like(p, math.nan if bad else 1.0)
                        with mock.patch.object(inner, "_is_current", wraps=inner._is_current) as looks, \
                                mock.patch.object(inner._plans[0], "report", wraps=inner._plans[0].report) as report:
                            found = step()
                        self.assertEqual(looks.call_count, 1, (wrapper, name, kind))
                        self.assertIs(found, bad)
                        self.assertEqual([call[0] for call in report.mock_calls], ["tolist"], (wrapper, name, kind))
                        self.assertIs(optimizer.overflow, bad)

    def test_timed_steps_have_the_same_bits(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            for kind, options in EVERY:
                for compat in (None, "deepspeed"):
                    options = dict(options, compat=compat, weight_decay=0.1)
                    params, optimizer = self.make(wrapper, kind, options, clip_grad=1.0)
                    others, timed = self.make(wrapper, kind, options, clip_grad=1.0)
                    timed.timers = Wall(True)
                    for i in range(9):
                        bad = 0 if i in (1, 5) else None
                        self.assertEqual(self.step(params, optimizer, i, bad), self.step(others, timed, i, bad))
                        if i == 6:
                            timed.load_state_dict(timed.state_dict())
                            optimizer.load_state_dict(optimizer.state_dict())
                    self.assertEqual(timed.cur_scale, optimizer.cur_scale)
                    self.assert_same(others, params)
                    self.assert_same(timed.masters()[0], optimizer.masters()[0])
                    for p, q in zip(params, others):
                        a, b = optimizer.state[p], timed.state[q]
                        self.assertEqual(list(a), list(b))
                        self.assert_same(list(b.values()), list(a.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child([one_rank_logs, one_rank_sets_equal_values], int(sys.argv[3]), sys.argv[4])
    else:
        main()
