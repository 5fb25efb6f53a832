# SPDX-License-Identifier: Apache-2.0
"""Memory of parameters, gradients and state that changes between steps; gradients of any strides."""
import copy
import ctypes
import sys
import types
import unittest.mock

from support import VERSION, TestCase, give_grads, main, params_of, torch

from dsopt.torch import (SGD, Adagrad, Adam, AdamW, FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb,
                         FusedLion, Lion, OnebitAdam, OnebitLamb, ZeroOneAdam, _tensors)

EVERY = (SGD, Adagrad, Adam, AdamW, Lion, FusedAdam, FusedLion, FusedLamb, OnebitAdam, ZeroOneAdam, OnebitLamb)
WRAPPERS = (FP16_Optimizer, FP16_UnfusedOptimizer)


class Memory:
    """Places tensors of any dtype, shape and strides at the start of one allocation, as an allocator may do with
    successive
    tensors."""

    def __init__(self, size=1 << 12):
        self.bytes = (ctypes.c_char * size)()

    def put(self, values, strides=None):
        tensor = torch.frombuffer(self.bytes, dtype=values.dtype)
        return tensor.as_strided(values.shape, strides or values.contiguous().stride()).copy_(values)


class SameAddress(TestCase):
    """An address alone does not identify the tensor at it."""

    def expect(self, params, optimizer, **options):
        """Expects the next step of `optimizer` to equal that of another over copies, with a copy of its state."""
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        fresh = type(optimizer)(others, **options)
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for p, q in zip(params, others):
            if p.grad is not None:
                q.grad = torch.zeros_like(q)
                q.grad.data = p.grad.clone()
        optimizer.step()
        fresh.step()
        self.assert_same(params, others)

    def test_detects_parameter_of_another_dtype(self):
        memory, params = Memory(), params_of((8, 8))
        params[0].data = memory.put(params[0].detach().half())
        optimizer = AdamW(params, lr=0.1)
        params[0].grad = torch.full((8, 8), 0.5, dtype=torch.float16)
        optimizer.step()
        start = params[0].detach().bfloat16()
        params[0].grad = None
        params[0].data = memory.put(start)
        params[0].grad = torch.full((8, 8), 0.5, dtype=torch.bfloat16)
        optimizer.step()
        self.assert_close(params[0].detach().float(), start.float() * 0.999 - 0.1, rtol=0, atol=0.02)
        self.assertEqual(optimizer.state[params[0]]["step"].item(), 2)

    def test_detects_parameter_of_other_strides(self):
        for kind in (AdamW, SGD):
            memory, params = Memory(), params_of((4, 4))
            params[0].data = memory.put(params[0].detach())
            optimizer = kind(params, lr=0.1, **({"momentum": 0.9} if kind is SGD else {}))
            give_grads(params)
            optimizer.step()
            params[0].data = memory.put(params[0].detach().clone(), (1, 4))
            self.expect(params, optimizer, lr=0.1)

    def test_detects_gradient_of_another_dtype(self):
        memory, params = Memory(), params_of((8,), dtype=torch.float16)
        optimizer = AdamW(params, lr=0.1)
        params[0].grad = memory.put(torch.linspace(-1, 1, 8).half())
        optimizer.step()
        # torch compares the dtypes of a gradient and its parameter only at assignment
        params[0].grad.data = memory.put(torch.linspace(-1, 1, 8).bfloat16())
        self.assertEqual(params[0].grad.dtype, torch.bfloat16)
        self.expect(params, optimizer, lr=0.1)

    def test_detects_gradient_of_other_strides(self):
        memory, params = Memory(), params_of((4, 4), (3,))
        optimizer = AdamW(params, lr=0.1)
        give_grads(params)
        values = params[0].grad
        params[0].grad = memory.put(values)
        optimizer.step()
        params[0].grad = memory.put(values, (1, 4))
        self.expect(params, optimizer, lr=0.1)

    def test_gradient_of_another_size_is_refused(self):
        params = params_of((8,), (3,))
        optimizer = AdamW(params, lr=0.1)
        give_grads(params)
        optimizer.step()
        params[0].grad.resize_(4)
        with self.assertRaisesRegex(ValueError, r"\['params'\]\[0\] has shape \(4,\)"):
            optimizer.step()

    def test_gradient_of_another_shape_is_refused(self):
        params = params_of((4, 3), (3,))
        optimizer = AdamW(params, lr=0.1)
        give_grads(params)
        optimizer.step()
        before = [p.detach().clone() for p in params]
        for shape in ((3, 4), (12,), (4, 1, 3)):
            params[0].grad.data = params[0].grad.detach().reshape(shape)  # the address stays
            with self.assertRaisesRegex(ValueError, r"\['params'\]\[0\] has shape \(%d," % shape[0]):
                optimizer.step()
            self.assert_same(params, before)
            params[0].grad.data = torch.ones(shape)
            with self.assertRaisesRegex(ValueError, r"\['params'\]\[0\] has shape \(%d," % shape[0]):
                optimizer.step()
            self.assert_same(params, before)
        params[0].grad.data = torch.ones(4, 3)
        self.expect(params, optimizer, lr=0.1)

    def test_parameter_of_another_shape_is_refused(self):
        for same_address in (True, False):
            params = params_of((4, 3))
            optimizer = AdamW(params, lr=0.1)
            give_grads(params)
            optimizer.step()
            params[0].grad = None
            params[0].data = params[0].detach().reshape(6, 2) if same_address else torch.ones(6, 2)
            params[0].grad = torch.ones(6, 2)
            before = params[0].detach().clone()
            with self.assertRaisesRegex(ValueError, r"\[0\] has shape \(4, 3\), and the parameter \(6, 2\)"):
                optimizer.step()
            self.assert_same(params, [before])

    def test_detects_gradient_of_another_dtype_after_none(self):
        """After an absent gradient, or a call with copies, the fast path does not reuse an old dtype."""
        for between in ("none", "transposed", "refused", "sparse"):
            params = params_of((4, 4), (3,), dtype=torch.float16)
            optimizer = AdamW(params, lr=0.1)
            half = [torch.linspace(-1, 1, 16).half().reshape(4, 4), torch.ones(3).half()]
            params[0].grad, params[1].grad = half
            optimizer.step()
            params[0].grad = torch.ones(4, 4).half()
            params[0].grad.data = half[0].bfloat16()
            if between == "transposed":
                params[0].grad.data = params[0].grad.detach().t().contiguous().t()
            if between == "refused":
                params[1].grad = torch.ones(3).half()
                params[1].grad.data = torch.ones(4).half()
                with self.assertRaises(ValueError):
                    optimizer.step()
            elif between == "sparse":
                params[1].grad = torch.ones(3).half().to_sparse()
                with self.assertRaises(NotImplementedError):
                    optimizer.step()
            else:
                optimizer.step()
            if between == "none":
                params[0].grad = None
                optimizer.step()
            params[0].grad, params[1].grad = half
            self.expect(params, optimizer, lr=0.1)

    def test_detects_the_negative_bit_of_a_gradient(self):
        """The imaginary part of a conjugate has the address and layout of the number's imaginary part."""
        params, number = params_of((1,)), torch.complex(torch.zeros(1), torch.full((1,), 2.0))
        optimizer = AdamW(params, lr=0.1)
        params[0].grad = number.imag
        optimizer.step()
        params[0].grad = number.conj().imag
        self.assertEqual(params[0].grad.data_ptr(), number.imag.data_ptr())
        self.expect(params, optimizer, lr=0.1)

    def test_state_of_another_shape_is_refused(self):
        for change in (lambda t: t.resize_(5), lambda t: t.t_(), lambda t: setattr(t, "data", t.detach()[:2])):
            params = params_of((4, 3))
            optimizer = AdamW(params, lr=0.1)
            give_grads(params)
            optimizer.step()
            change(optimizer.state[params[0]]["exp_avg"])
            before = params[0].detach().clone()
            with self.assertRaisesRegex(ValueError, "state 'exp_avg' of .* has shape"):
                optimizer.step()
            self.assert_same(params, [before])

    def test_detects_state_of_other_strides(self):
        params = params_of((4, 4))
        optimizer = AdamW(params, lr=0.1)
        give_grads(params)
        optimizer.step()
        optimizer.state[params[0]]["exp_avg"].t_()
        self.expect(params, optimizer, lr=0.1)

    def test_memory_of_state_is_kept(self):
        """Between two steps no other tensor can reuse the address of state whose memory was replaced."""
        params = params_of((1000,))
        optimizer = SGD(params, lr=0.1, momentum=0.5)
        give_grads(params)
        optimizer.step()
        buffer = optimizer.state[params[0]]["momentum_buffer"]
        address = buffer.data_ptr()
        buffer.data = torch.ones(1000)
        self.assertNotIn(address, [torch.empty(1000).data_ptr() for _ in range(50)])
        before = params[0].detach().clone()
        optimizer.step()
        self.assert_close(params[0].detach(), before - 0.1 * (0.5 + params[0].grad))


class SameAddressBeforeTorch21(SameAddress):
    """Without the class that compares all attributes in one call."""

    def setUp(self):
        super().setUp()
        patch = unittest.mock.patch("dsopt.torch._tensors._Guards", None)
        patch.start()
        self.addCleanup(patch.stop)


class LayoutsEqual(TestCase):
    def test_compares_every_attribute(self):
        for guards in (_tensors._Guards, None):
            with unittest.mock.patch("dsopt.torch._tensors._Guards", guards):
                first = torch.ones(4, 4)
                layouts = _tensors.Layouts([first, torch.ones(2)])
                self.assertEqual(guards is not None and VERSION >= (2, 1), layouts.check is not None)
                for other in (first, torch.zeros(4, 4), torch.nn.Parameter(first)):
                    self.assertTrue(layouts.equal([other, torch.zeros(2)]))
                for other in (first.half(), first.int(), torch.ones(16), torch.ones(2, 8), first.t(),
                              torch.ones(4, 4, device="meta"), torch._neg_view(first)):
                    self.assertFalse(layouts.equal([other, torch.ones(2)]))
                with torch.inference_mode():
                    self.assertTrue(layouts.equal([first, torch.ones(2)]))


class OtherVersions(TestCase):
    def test_versions_are_incremented_one_by_one_before_torch_25(self):
        """There the function refuses a list."""
        seen = []

        def increment(tensor):
            if not isinstance(tensor, torch.Tensor):
                raise RuntimeError("increment_version expect a Tensor as input")
            seen.append(tensor)

        tensors = params_of((4,), (3,))
        for function, expected in ((increment, tensors), (seen.append, [tensors])):
            with unittest.mock.patch.object(torch._C, "_increment_version", function, create=True):
                bump = _tensors._bump()
            seen.clear()
            bump(tensors)
            self.assertEqual(list(map(id, seen)), list(map(id, expected)))
        with unittest.mock.patch.object(torch._C, "_increment_version", None, create=True):
            self.assertIsNone(_tensors._bump())

    def test_module_without_dtensor_does_not_hide_the_one_that_has_it(self):
        """torch.distributed.tensor of torch 2.4 only has `parallel`."""
        without, having = types.SimpleNamespace(), types.SimpleNamespace(DTensor=torch.nn.Parameter)
        names = ("torch.distributed.tensor", "torch.distributed._tensor")
        for modules, expected in (((without, having), True), ((having, having), True), ((None, having), True),
                                  ((having, None), True), ((without, None), False), ((None, None), False)):
            with unittest.mock.patch.dict(sys.modules, dict(zip(names, modules))):
                self.assertEqual(_tensors.is_dtensor(params_of((2,))[0]), expected, modules)
                self.assertFalse(_tensors.is_dtensor(torch.ones(2)))


class PresentGoneAbsent(TestCase):
    def test_freed_gradients_are_not_used(self):
        """A gradient that was freed is not used, and its memory not written."""
        for kind in EVERY:
            params = params_of((64,), (32,))
            optimizer = kind(params, lr=0.1)
            for turn in range(6):
                give_grads(params, seed=turn)
                optimizer.step()
                gone = params[turn % 2].grad.clone()
                params[turn % 2].grad = None
                # One of these may reuse the memory of the gradient.
                filled = [torch.full((64 >> turn % 2,), 3.0) for _ in range(8)]
                before = [p.detach().clone() for p in params]
                optimizer.step()
                self.assert_same([params[turn % 2]], [before[turn % 2]])
                self.assertFalse(torch.equal(params[1 - turn % 2].detach(), before[1 - turn % 2]))
                for tensor in filled:
                    self.assertTrue(bool((tensor == 3).all()))
                params[turn % 2].grad = gone
                optimizer.step()
                self.assertFalse(torch.equal(params[turn % 2].detach(), before[turn % 2]))
                params[0].grad = params[1].grad = None
                before = [p.detach().clone() for p in params]
                optimizer.step()
                self.assert_same(params, before)

    def test_gaps_of_parameters_are_not_written(self):
        """Memory between the elements of a parameter is not written, whether it has a gradient or not."""
        for kind in (OnebitAdam, OnebitLamb, AdamW):
            big = torch.randn(6, 10)
            params, others = [torch.nn.Parameter(big[:, ::2])], [torch.nn.Parameter(big[:, ::2].clone())]
            self.assertEqual(params[0].data_ptr(), big.data_ptr())
            between = big[:, 1::2].clone()
            optimizers = [kind(some, lr=0.1) for some in (params, others)]
            for turn in range(4):
                give_grads(params, others, seed=turn)
                if turn == 2:
                    params[0].grad = others[0].grad = None
                for optimizer in optimizers:
                    optimizer.step()
                self.assert_same(params, others)
                self.assertTrue(torch.equal(big[:, 1::2], between))

    def test_masters_work_for_parameters_with_gaps(self):
        for wrapper in WRAPPERS:
            big = torch.randn(6, 10).half()
            params = [torch.nn.Parameter(big[:, ::2])]
            optimizer = wrapper(FusedAdam(params))
            self.assert_same(optimizer.masters()[0], [params[0].detach().float()])


class Strides(TestCase):
    """Gradients that are not contiguous and do not have their parameter's strides are copied."""

    def kinds_of_strides(self, shape, values):
        """Yields the same values with different strides."""
        rows, columns = shape
        yield "transposed", values.t().contiguous().t()
        yield "slice", torch.zeros(rows, 2 * columns, dtype=values.dtype)[:, ::2].copy_(values)
        yield "reversed memory", values.flip(0).flip(0)
        yield "offset", torch.zeros(rows + 1, columns + 3, dtype=values.dtype)[1:, 2:-1].copy_(values)

    def agree(self, make, dtype=torch.float32):
        shape = (6, 4)
        ways = [name for name, _ in self.kinds_of_strides(shape, torch.zeros(shape, dtype=dtype))]
        for order in ("contiguous", "transposed"):
            for way in ways:
                params, others = params_of(shape, (5,), dtype=dtype), params_of(shape, (5,), dtype=dtype)
                for some in (params, others):
                    if order == "transposed":
                        some[0].data = some[0].data.t().contiguous().t()
                optimizers = [make(params), make(others)]
                for turn in range(5):
                    give_grads(params, others, seed=turn)
                    if turn != 1:
                        params[0].grad = dict(self.kinds_of_strides(shape, params[0].grad))[way]
                    passed, values = params[0].grad, params[0].grad.clone()
                    for optimizer in optimizers:
                        optimizer.step()
                    self.assertTrue(torch.equal(passed, values), "the gradient is changed")
                self.assert_same(params, others)

    def test_every_class_accepts_any_strides(self):
        for kind in EVERY:
            self.agree(lambda params: kind(params, lr=0.1))

    def test_wrappers_accept_any_strides(self):
        for wrapper in WRAPPERS:
            for kind in (FusedAdam, OnebitAdam):
                self.agree(lambda params: wrapper(kind(params, lr=0.1), clip_grad=0.1), torch.float16)

    def test_accepts_expanded_gradients(self):
        """The gradient of a sum: all elements share memory."""
        params, others = params_of((4, 6)), params_of((4, 6))
        ours, theirs = AdamW(params), torch.optim.AdamW(others)
        params[0].grad, others[0].grad = torch.tensor(2.0).expand(4, 6), torch.full((4, 6), 2.0)
        ours.step()
        theirs.step()
        self.assert_close(params, others)

    def test_accepts_imaginary_part_of_a_conjugate(self):
        """torch negates it lazily, on reading."""
        for count in (1, 4):
            params, others = params_of((count,)), params_of((count,))
            ours, theirs = SGD(params, lr=0.1), torch.optim.SGD(others, lr=0.1)
            for _ in range(2):
                params[0].grad = torch.complex(torch.zeros(count), torch.full((count,), 2.0)).conj().imag
                self.assertTrue(params[0].grad.is_neg())
                others[0].grad = torch.full((count,), -2.0)
                ours.step()
                theirs.step()
            self.assert_close(params, others)

    def test_zero_grad_writes_to_the_gradient_itself(self):
        for make in (AdamW, lambda params: FP16_UnfusedOptimizer(FusedAdam(params), low_precision_dtype=torch.float32)):
            params = params_of((4, 6))
            optimizer = make(params)
            memory = torch.ones(6, 8)
            params[0].grad = memory[:, ::2].t()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            self.assertEqual(memory[:, ::2].abs().sum().item(), 0)
            self.assertTrue(bool((memory[:, 1::2] == 1).all()))

    def test_accepts_complex_gradients(self):
        params, others = params_of((3, 4), dtype=torch.complex64), params_of((3, 4), dtype=torch.complex64)
        ours, theirs = AdamW(params), torch.optim.AdamW(others)
        values = torch.randn(4, 3, dtype=torch.complex64)
        for _ in range(3):
            params[0].grad, others[0].grad = values.conj().t(), values.conj().t().resolve_conj().contiguous()
            ours.step()
            theirs.step()
        self.assert_close(params, others)


if __name__ == "__main__":
    main()
