# SPDX-License-Identifier: Apache-2.0
"""Invalid arguments are rejected by name, before anything changes."""
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import unittest

import tensorflow as tf

import dsopt
import dsopt.tf
from dsopt.tf import _build
from support import fit, gradients, make_model, same, variables, weights


ADAMW = ["algorithm=%d" % dsopt.AdamW.algorithm, "flags=%d" % dsopt.AdamW(eps_uncorrected=True).struct().flags]


def text_of(shape):
    """Returns the shape as TensorFlow formats it."""
    return str(shape).replace(" ", "")


class Optimizer(unittest.TestCase):
    def refused(self, kind, *words):
        return self.assertRaisesRegex(kind, "(?s)" + ".*".join(words))

    def test_rejects_invalid_arguments(self):
        with self.refused(dsopt.UnsupportedError, "amsgrad"):
            dsopt.tf.AdamW(amsgrad=True)
        with self.refused(ValueError, "weight_decay"):
            dsopt.tf.AdamW(weight_decay=None)
        with self.refused(ValueError, "momentum"):
            dsopt.tf.Adam(momentum=0.9)
        with self.refused(ValueError, "clipnorm", "global_clipnorm"):
            dsopt.tf.Adam(clipnorm=1.0, global_clipnorm=1.0)

    def test_rejects_hyper_parameters_out_of_range(self):
        for name, word, value in (("beta_1", "beta1", 1.0), ("beta_1", "beta1", float("nan")),
                                  ("beta_2", "beta2", -0.1), ("epsilon", "eps", -1.0),
                                  ("weight_decay", "weight_decay", -0.5)):
            for graph in (False, True):
                with self.subTest(name=name, graph=graph):
                    params, optimizer = variables((5,)), dsopt.tf.AdamW(**{name: value})
                    before = weights(params)
                    optimizer.build(params)
                    step = (tf.function if graph else lambda f: f)(lambda g: optimizer.apply(g, params))
                    with self.refused(tf.errors.InvalidArgumentError, word + " is"):
                        step(gradients(params, 0))
                    self.assertTrue(same(weights(params), before))

    def test_rejects_learning_rates_out_of_range(self):
        for value in (-0.1, float("nan"), float("inf")):
            params, optimizer = variables((5,)), dsopt.tf.AdamW(value)
            before = weights(params)
            with self.refused(tf.errors.InvalidArgumentError, "learning_rate is"):
                optimizer.apply(gradients(params, 0), params)
            self.assertTrue(same(weights(params), before))

    def test_rejects_invalid_variables(self):
        with self.refused(dsopt.ArgumentError, "'w0", "float64"):
            dsopt.tf.Adam().build(variables((5,), dtype="float64"))
        params, optimizer = variables((5,), (6,)), dsopt.tf.Adam()
        grads = gradients(params, 0)
        with self.refused(dsopt.ArgumentError, "'w1:0'", "twice"):
            optimizer.apply_gradients([(grads[0], params[0]), (grads[1], params[1]), (grads[1], params[1])])
        optimizer.build(params)
        with self.refused(dsopt.ArgumentError, "'w0:0'", "twice"):
            optimizer.apply_gradients([(grads[0], params[0]), (grads[0], params[0])])
        with self.refused(ValueError, "Unknown variable"):
            optimizer.apply_gradients(zip(grads, variables((5,), (6,))))

    def test_rejects_invalid_gradients(self):
        params, optimizer = variables((5,), (6,)), dsopt.tf.Adam()
        optimizer.build(params)
        before = weights(params)
        with self.refused(tf.errors.InvalidArgumentError, "gradient of 'w1:0'", r"\[7\]", r"\[6\]"):
            optimizer.apply([tf.ones(5), tf.ones(7)])
        with self.refused(tf.errors.InvalidArgumentError, "gradient of 'w0:0'"):
            optimizer.apply([tf.ones((5, 1)), tf.ones(6)])
        with self.refused(dsopt.ArgumentError, "'w0:0'", "int32"):
            optimizer.apply([tf.ones(5, tf.int32), tf.ones(6)])
        with self.refused(ValueError, "No gradients"):
            optimizer.apply([None, None])
        self.assertTrue(same(weights(params), before))
        optimizer.apply([tf.ones(5), tf.ones(6)])  # still usable
        self.assertEqual(int(optimizer.iterations), 1)

    def test_errors_number_duplicate_names(self):
        params = [tf.Variable(tf.ones(3)), tf.Variable(tf.ones(3))]
        optimizer = dsopt.tf.Adam()
        optimizer.build(params)
        with self.refused(tf.errors.InvalidArgumentError, r"'Variable:0 \(number 1\)'"):
            optimizer.apply([tf.ones(3), tf.ones(4)])

    def test_rejects_moments_of_another_shape_or_dtype(self):
        params, optimizer = variables((5,)), dsopt.tf.Adam()
        optimizer.build(params)
        plan = optimizer._plan(params)
        other = tf.Variable(tf.ones(4))
        for place, word in enumerate(("momentum of 'w0:0'", "velocity of 'w0:0'")):
            kept = plan.state[place]
            for given, words in ((other, (word, r"\[4\]")), (tf.Variable(tf.ones(5, tf.bfloat16)), (word, "bfloat16",
                                 "float")), (params[0], ("twice",))):
                plan.state[place] = given
                with self.refused(tf.errors.InvalidArgumentError, *words):
                    optimizer.apply([tf.ones(5)])
            plan.state[place] = kept
        plan.state.append(other)
        with self.refused(tf.errors.InvalidArgumentError, "state has 3 variables, must have 2"):
            optimizer.apply([tf.ones(5)])

    def test_rejects_xla(self):
        params, optimizer = variables((5,)), dsopt.tf.Adam()
        optimizer.build(params)
        with self.refused(dsopt.UnsupportedError, "jit_compile=False"):
            tf.function(lambda: optimizer.apply([tf.ones(5)]), jit_compile=True)()
        with self.refused(dsopt.UnsupportedError, "jit_compile=False"):
            tf.function(lambda: tf.function(lambda: optimizer.apply([tf.ones(5)]))(), jit_compile=True)()
        with self.refused(dsopt.UnsupportedError, "jit_compile=False"):
            fit(make_model(dsopt.tf.Adam(), jit_compile=True), 1)

    def test_rejects_distribution_strategies(self):
        strategy = tf.distribute.MirroredStrategy(["cpu:0"])
        with strategy.scope():
            model = make_model(dsopt.tf.Adam())
        with self.refused(dsopt.UnsupportedError, "tf.distribute"):
            fit(model, 1)


class Op(unittest.TestCase):
    """The op alone, for hand-written graphs."""

    def call(self, variables_of_op=None, **changed):
        params, *state = variables_of_op or (variables((5,))[0] for _ in range(3))
        arguments = dict(
            params=[params.handle], state=[variable.handle for variable in state], grads=[tf.ones(5)],
            steps=tf.zeros([1], tf.int32), lr=tf.fill([2], 0.1), grad_scale=[], names=["w"], dtypes=[tf.float32],
            shapes=[[5]], fields=2 * ADAMW, group_of=[0], f32_moments=[False],
            blocks=[0, 0], rows_are_inputs=[False], remainders=False, seed=0, clipvalue="0")
        return _build.ops().dsopt_step(**{**arguments, **changed})

    def refused(self, words, **changed):
        with self.subTest(**changed), self.assertRaisesRegex(tf.errors.InvalidArgumentError, words):
            self.call(**changed)

    def test_attributes_are_checked(self):
        self.call()
        for name, value, words in (
                ("fields", ["algorithm=2", "beta1=often"], "beta1 is 'often', which is no number"),
                ("fields", ["algorithm=2", "flags=0.5"], "flags is '0.5', which is no integer"),
                ("fields", ["algorithm=2", "flags"], "flags is '', which is no integer"),
                ("fields", ["algorithm=2", "beta3=1"], "'beta3' is no field of a group"),
                ("fields", ["algorithm=99"], "algorithm"), ("fields", [], "Value for attr|at least minimum 1"),
                ("fields", ["beta1=0.9", "algorithm=2"], "first field of a group must be its algorithm"),
                ("fields", ADAMW + ["exp_avg_format=99"], "exp_avg_format"),
                ("fields", ADAMW + ["exp_avg_format=4"], "state has 2 variables, must have 3"),
                ("group_of", [2], "group"), ("blocks", [0], "blocks has 1 elements, must have 2, two per variable"),
                ("rows_are_inputs", [], "rows_are_inputs has 0 elements, must have 1"),
                ("names", ["a", "b"], "names has 2 elements, must have 1"),
                ("group_of", [], "group_of has 0 elements, must have 1"), ("shapes", [[6]], "variable 'w'"),
                ("f32_moments", [], "f32_moments has 0 elements, must have 1"),
                ("state", [], "Value for attr 'm' of 0 must be at least minimum 1"),
                ("shapes", [[5], [5]], "shapes has 2 elements, must have 1"),
                ("dtypes", [tf.float32] * 2, "dtypes has 2 elements, must have 1"),
                ("dtypes", [tf.float16], "variable 'w' has dtype float, must be half"),
                ("shapes", [None], "variable 'w' has shape <unknown>, must be fully defined"),
                ("shapes", [[None]], r"variable 'w' has shape \[\?\], must be fully defined"), ("names", [""], "name"),
                ("clipvalue", "-1", "max_value"), ("grads", [tf.ones(5)] * 2, "grads has 2 elements, must have 1"),
                ("grad_scale", [tf.ones([])] * 2, "grad_scale has 2 tensors, must have 0 or 1")):
            self.refused(words, **{name: value})

        with self.assertRaisesRegex(tf.errors.UnimplementedError, "rows and cols of parameter 'w'"):
            self.call(blocks=[5, 1])

    def test_shapes_of_inputs_are_checked(self):
        """Too few elements, none, too many, another number of dimensions."""
        scalar = tf.ones([])
        self.call(grad_scale=[scalar], grads=[tf.ones(5, tf.bfloat16)])
        for name, good, dtype, shapes in (("steps", "[1]", tf.int32, ([0], [2], [], [1, 1])),
                                          ("lr", "[2]", tf.float32, ([0], [1], [3], [], [2, 1])),
                                          ("grad_scale", "[]", tf.float32, ([0], [1], [2])),
                                          ("grads", "[5]", tf.float32, ([0], [4], [6], [5, 1], []))):
            for shape in shapes:
                value = tf.ones(shape, dtype)
                role = "gradient of 'w'" if name == "grads" else name
                self.refused(re.escape("%s has shape %s, must be %s" % (role, text_of(shape), good)),
                             **{name: value if name in ("steps", "lr") else [value]})
        for what, index in (("variable", 0), ("momentum of", 1), ("velocity of", 2)):
            for shape in ([4], [6], [0], [5, 1], []):
                given = [variables((5,))[0] for _ in range(3)]
                given[index] = tf.Variable(tf.ones(shape))
                before = weights(given)
                self.refused(re.escape("%s 'w' has shape %s, must be [5]" % (what, text_of(shape))),
                             variables_of_op=given)
                self.assertTrue(same(weights(given), before))
            handles = [variable.handle for variable in given]
            handles[index] = tf.reshape(handles[index], [1])
            self.refused(r"handle of %s 'w' has shape \[1\], must be \[\]" % what, params=handles[:1],
                         state=handles[1:])

    def test_dtypes_of_inputs_are_checked(self):
        for name, value in (("steps", tf.zeros([1])), ("steps", tf.zeros([1], tf.int64)),
                            ("lr", tf.zeros([2], tf.float64)), ("lr", tf.zeros([2], tf.int32)),
                            ("grad_scale", [tf.ones([], tf.float16)]), ("grads", [tf.ones(5, tf.float64)]),
                            ("grads", [tf.ones(5, tf.int32)]), ("params", [tf.ones(5)])):
            # TensorFlow's error text, which for lists names the attribute instead of the input.
            self.refused("cannot compute|not in the list of allowed values|Value for attr", **{name: value})
        for index, what in enumerate(("variable", "momentum of", "velocity of")):
            given = [variables((5,))[0] for _ in range(3)]
            given[index] = tf.Variable(tf.ones(5, tf.float64))
            self.refused("%s 'w' has dtype double, must be float" % what, variables_of_op=given)
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        self.refused("variable 'w' must be a resource variable", params=[table.resource_handle])

    def test_rejects_uninitialized_variables(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            self.call([tf.compat.v1.get_variable(name, [5], use_resource=True) for name in "abc"], name="step")
            with self.assertRaisesRegex(tf.errors.FailedPreconditionError, "variable 'w' is not initialized"):
                session.run("step")


class Building(unittest.TestCase):
    def run_program(self, text, **environment):
        code = "import os; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n" + textwrap.dedent(text)
        return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600).stdout

    USE = """
        import dsopt.tf, tensorflow as tf
        try:
            dsopt.tf.Adam().build([tf.Variable(1.0)])
        except Exception as problem:
            print("%s: %s" % (type(problem).__name__, problem))
        else:
            print("built")
    """

    def test_build_problems_are_reported(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "file")
            with open(file, "w", encoding="utf-8") as wrong:
                wrong.write("no library")
            for environment, words in (({"CXX": "/no/such/compiler"}, ("could not run", "/no/such/compiler")),
                                       ({"CXX": "false"}, ("could not compile", tf.__version__, "false")),
                                       ({"CXX": "", "PATH": folder}, ("no C++ compiler", "CXX", "DSOPT_TF_OP")),
                                       ({"DSOPT_CACHE": os.path.join(file, "x")}, ("DSOPT_CACHE", "x")),
                                       ({"DSOPT_TF_OP": file}, ("no op of dsopt.tf", file))):
                said = self.run_program(self.USE, **{"DSOPT_CACHE": os.path.join(folder, "cache"), **environment})
                for word in ("MissingError",) + words:
                    self.assertIn(word, said)
            kept = [name for _, _, names in os.walk(os.path.join(folder, "cache")) for name in names]
            self.assertEqual(kept, [".lock"])

    def test_rejects_other_keras_backends(self):
        said = self.run_program("""
            import sys, types
            import keras
            keras.backend.backend = lambda: "jax"
            try:
                import dsopt.tf
            except ImportError as problem:
                print(problem)
        """)
        self.assertIn("KERAS_BACKEND", said)

    def test_forked_child_cannot_step(self):
        """The child cannot step with the parent's optimizer, and reports that."""
        said = self.run_program("""
            import dsopt.tf, tensorflow as tf, os, sys
            w = tf.Variable([1.0]); optimizer = dsopt.tf.Adam(); optimizer.apply([tf.ones(1)], [w])
            child = os.fork()
            if child == 0:
                try:
                    optimizer.apply([tf.ones(1)], [w])
                except Exception as problem:
                    print(type(problem).__name__, problem, flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            optimizer.apply([tf.ones(1)], [w]); print("parent", int(optimizer.iterations))
        """)
        self.assertIn("parent 2", said)
        self.assertIn("DSOPT_ERR_FORKED", said)

    def test_interpreter_exits_while_a_step_runs(self):
        said = self.run_program("""
            import dsopt.tf, tensorflow as tf, threading
            w = tf.Variable(tf.ones(1 << 20)); optimizer = dsopt.tf.Adam(); optimizer.build([w])
            begun = threading.Event()
            def work():
                while True:
                    optimizer.apply([w.read_value()]); begun.set()
            threading.Thread(target=work, daemon=True).start()
            begun.wait(); print("end", flush=True)
        """)
        self.assertEqual(said.strip().splitlines()[-1], "end")


if __name__ == "__main__":
    unittest.main()
