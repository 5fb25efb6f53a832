# SPDX-License-Identifier: Apache-2.0
"""The program of one device on its shards.

Update rules are element-wise, so a step of shards is a step of smaller parameters. Everything that depends on whole
tensors (overflow, clipping, norms of the report, trust ratios) is summed over the devices, in one all-reduce of a few
floats per tensor before the step, and in another one after it for LAMB and for norms of the report. Scales of moments
are gathered in one all-gather after the step."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from .. import _abi as abi
from . import _call, _remainders

_FAR = 68  # norms are squared unscaled, and times 2^-68 and 2^68: one of the three squares is in the range of fp32


def program(call, places, axis):
    """Returns the function of one device's shards for a _call.Init or _call.Step. `axis` is over all devices."""
    recipe = call.recipe
    local = dataclasses.replace(call, recipe=recipe.of_shards([place.shape for place in places]))
    is_spread = any(place.shape != param.shape for place, param in zip(places, recipe.params))
    if not is_spread or not call.needs_whole_tensors:
        return local
    for i, (place, param) in enumerate(zip(places, recipe.params)):
        if recipe.is_matrix(i) and not _has_whole_matrices(param, place):
            raise _call.unsupported(
                "dsopt.jax: Muon needs whole matrices, and the sharding of parameter %s with shape %s divides them into "
                "shards of shape %s: replicate it, or shard a dimension that counts matrices"
                % (param.name, param.shape, place.shape)
            )
    for place, param in zip(places, recipe.params):
        if place.padded:
            raise _call.unsupported(
                "dsopt.jax: the sharding of parameter %s does not divide its shape %s, which clipping, overflow "
                "checks, loss scales, norms, LAMB, random rounding and moments with scales do not support: choose "
                "axes that divide it" % (param.name, param.shape)
            )
    if isinstance(call, _call.Init):
        return _init(call, local)
    return _Shards(call, local, places, axis)


def _init(call, local):
    """Returns the initial values, with the scales of whole tensors."""

    def init(*arrays):
        entries = call.recipe.layout.entries
        return [x if entry.block == 1 else jnp.zeros(entry.shape, x.dtype) for entry, x in zip(entries, local(*arrays))]

    return init


class _Shards:
    """A step of shards."""

    def __init__(self, call, local, places, axis):
        self.call, self.local, self.places, self.axis = call, local, places, axis
        self.recipe = call.recipe
        if self.recipe.is_lamb and any(map(self.recipe.weight_is_random, range(len(self.recipe.params)))):
            raise _call.unsupported(
                "dsopt.jax: stochastic_rounding of LAMB is not supported for sharded parameters: use masters"
            )
        if self.recipe.is_lamb and self.recipe.has_matrices:
            raise _call.unsupported("dsopt.jax: LAMB next to Muon is not supported for sharded parameters")
        devices = places[0].sharding._device_assignment  # pylint: disable=protected-access
        starts = [_starts(self.recipe, i, place, devices) for i, place in enumerate(places)]
        self.scales = _Scales(call.entries(), starts, axis)
        if self.recipe.rounds_at_random:
            random = [self.recipe.weight_is_random(i) or self.recipe.moment_is_random(i) for i in range(len(places))]
            columns = [column if used else (0,) * len(column) for column, used in zip(starts, random)]
            offsets = tuple(zip(*columns))
            self.local = dataclasses.replace(local, recipe=dataclasses.replace(local.recipe, offsets=offsets))

    def __call__(self, *arrays):
        values, params, grads, state = self.call.split(arrays)
        bad = None
        if self.recipe.checks_nonfinite:
            norms, bad = self.whole(grads)
            groups = [[i for i, p in enumerate(self.recipe.params) if p.group == g] for g in range(self.groups)]
            values["grad_norms"] = jnp.stack([_hypot(norms[np.array(group)]) for group in groups])
        if self.recipe.rounds_at_random:
            values["rank"] = jax.lax.axis_index(self.axis).astype(jnp.int32)
        step = self.lamb if self.recipe.is_lamb else self.plain
        params, state, report = step(values, list(params), list(grads), self.scales.of_shard(state))
        state = self.scales.of_whole(state)
        if bad is not None:
            report = self.with_bad(report, bad)
        return [*params, *state, report]

    @property
    def groups(self):
        return len(self.recipe.groups)

    # ----------------------------------------------------------------------------------------------------------- norms
    def whole(self, arrays):
        """Returns L2 norm and number of Inf and NaN of each tensor, whose shards are `arrays`: two vectors."""
        copies = [place.copies for place in self.places] * (len(arrays) // len(self.places))
        mantissa, exponent, bad = _decoded(_call.norms(arrays, each=True))
        squares = [jnp.ldexp(mantissa * mantissa, 2 * (exponent + far)) for far in (0, -_FAR, _FAR)]
        sums = jnp.stack([*squares, bad]) * np.array([1 / n for n in copies], np.float32)
        plain, small, large, bad = jax.lax.psum(sums, self.axis)
        in_range = jnp.isfinite(plain) & (plain > 2.0**-60)
        far = jnp.where(plain <= 2.0**-60, jnp.sqrt(large) * 2.0**-_FAR, jnp.sqrt(small) * 2.0**_FAR)
        return jnp.where(in_range, jnp.sqrt(plain), far), jnp.round(bad)

    def with_bad(self, report, bad):
        """Returns the report with the Inf and NaN of all devices; the engine received only norms."""
        found = jnp.sum(bad)
        report = report.at[abi.DSOPT_REPORT_NONFINITE].set(found)
        report = report.at[abi.DSOPT_REPORT_FIRST_BAD].set(
            jnp.where(found > 0, jnp.argmax(bad > 0), -1).astype(jnp.float32)
        )
        if self.recipe.nonfinite == abi.DSOPT_NONFINITE_APPLY:
            return report
        return report.at[abi.DSOPT_REPORT_REASONS].add(jnp.where(found > 0, float(abi.DSOPT_SKIP_GRADIENTS), 0.0))

    def with_norms(self, report, weights, updates):
        """Returns the report with the norms of all weights and updates, from the norms of each tensor."""
        skipped = report[abi.DSOPT_REPORT_SKIPPED] != 0
        for place, norms in ((abi.DSOPT_REPORT_WEIGHT_NORM, weights), (abi.DSOPT_REPORT_UPDATE_NORM, updates)):
            report = report.at[place].set(jnp.where(skipped, report[place], _hypot(norms)))
        return report

    # ----------------------------------------------------------------------------------------------------------- steps
    def plain(self, values, params, grads, state):
        """Runs a step of the engine, with the values computed here."""
        names = tuple(name for name in _call.OPTIONS if name in values)
        local = dataclasses.replace(self.local, values=names)
        done = local(*(values[name] for name in names), *params, *grads, *state)
        n = len(grads)
        new, moved, report = done[:n], done[n:-1], done[-1]
        if self.recipe.reports_norms:
            before, after = self.weights(params, state), self.weights(new, moved)
            changes = [b.astype(jnp.float32) - a.astype(jnp.float32) for a, b in zip(before, after)]
            norms, _ = self.whole([*before, *changes])
            report = self.with_norms(report, norms[:n], norms[n:])
        return new, moved, report

    def weights(self, params, state):
        """Returns masters, and parameters without a master."""
        masters = self.by_name(state, "master")
        remainders = self.by_name(state, "remainder")
        masters.update({i: _remainders.join(params[i], remainder) for i, remainder in remainders.items()})
        return [masters.get(i, param) for i, param in enumerate(params)]

    def by_name(self, state, name):
        entries = self.recipe.layout.entries
        return {entry.param: x for entry, x in zip(entries, state) if entry.name == name}

    def lamb(self, values, params, grads, state):
        """Runs the engine's update on weights of zero, with a trust ratio and a learning rate of 1, so that the changes
        are the directions without their weight decay, not rounded to the precision of the weights. Then adds the weight
        decay, sums the norms of whole tensors, and updates the weights."""
        n, entries, step = len(params), self.recipe.layout.entries, self.by_name(state, "step")[-1]
        recipe, given = _of_direction(self.local.recipe), _values_of_direction(values)
        names = tuple(name for name in _call.OPTIONS if name in given)
        update = _call.Step(recipe, names, abi.DSOPT_STEP_DELTA, self.call.options, out=("float32",) * n)
        old = self.weights(params, state)
        ours = {(entry.name, entry.param): x for entry, x in zip(entries, state)}
        moments = [ours[entry.name, entry.param] for entry in recipe.layout.entries]
        done = update(*(given[x] for x in names), *map(jnp.zeros_like, old), *grads, *moments)
        changes, report = self.decayed(values, old, done[:n]), done[-1]
        ours.update({(e.name, e.param): x for e, x in zip(recipe.layout.entries, done[n:-1])})

        norms, _ = self.whole([*old, *changes])
        lower, upper = (self.of_group(place) for place in ("min_trust", "max_trust"))
        is_one = (norms[:n] == 0) | (norms[n:] == 0)
        ratio = jnp.where(is_one, 1, jnp.clip(norms[:n] / jnp.where(is_one, 1, norms[n:]), lower, upper))
        factor = self.rates(values, step) * ratio
        skipped = report[abi.DSOPT_REPORT_SKIPPED] != 0
        new = [
            jnp.where(skipped, a.astype(jnp.float32), a.astype(jnp.float32) + factor[i] * change)
            for i, (a, change) in enumerate(zip(old, changes))
        ]
        if self.recipe.reports_norms:
            report = self.with_norms(report, norms[:n], norms[n:] * factor)
        for entry, x in zip(entries, state):
            if entry.name == "master":
                ours[entry.name, entry.param] = new[entry.param]
            if entry.name == "remainder":
                new[entry.param], ours[entry.name, entry.param] = _remainders.split(new[entry.param])
            if entry.name == "trust_ratio":
                ours[entry.name, entry.param] = jnp.where(skipped, x, ratio)
        new = [jnp.where(skipped, param, x.astype(param.dtype)) for param, x in zip(params, new)]
        return new, [ours[entry.name, entry.param] for entry in entries], report

    def of_group(self, name):
        """Returns the field `name` of the group of each parameter."""
        place = _call.GROUP_REALS.index(name)
        return np.array([self.recipe.groups[param.group][1][place] for param in self.recipe.params], np.float32)

    def each(self, values, name, of_double=np.array, of_float=lambda row: row):
        """Returns an array with a value for each parameter, from a hyper-parameter of its group: `of_double` of the
        static one, `of_float` of the one in values["hyper"]."""
        groups = np.array([param.group for param in self.recipe.params])
        known = of_double(np.array([reals[_call.GROUP_REALS.index(name)] for _, reals in self.recipe.groups]))
        known = known.astype(np.float32)
        if "hyper" in values:
            row = values["hyper"][:, getattr(abi, "DSOPT_HYPER_" + name.upper())]
            known = jnp.where(jnp.isnan(row), known, of_float(row))
        return known[groups]

    def decayed(self, values, weights, changes):
        """Returns the changes of a step without weight decay, with weight decay."""
        factors = self.each(values, "weight_decay")
        if isinstance(factors, np.ndarray) and not factors.any():
            return changes
        return [change - factors[i] * w.astype(jnp.float32) for i, (w, change) in enumerate(zip(weights, changes))]

    def rates(self, values, step):
        """Returns learning rate times bias correction for each parameter."""
        with np.errstate(divide="ignore"):
            logs = [self.each(values, name, np.log, lambda row: jnp.log1p(row - 1)) for name in ("beta1", "beta2")]
        groups = np.array([param.group for param in self.recipe.params])
        rate = values["lr"][groups] if "lr" in values else self.each(values, "lr")
        if self.recipe.groups[0][0][1] & abi.DSOPT_GROUP_NO_BIAS_CORRECTION:
            return rate
        c1, c2 = (-jnp.expm1((step + 1).astype(jnp.float32) * log) for log in logs)
        return rate * jnp.sqrt(c2) / c1


def _of_direction(recipe):
    """Returns a LAMB recipe whose update is the direction without weight decay: its parameters are the masters."""
    groups = []
    for numbers, reals in recipe.groups:
        fields = dict(zip(_call.GROUP_REALS, reals), lr=1.0, weight_decay=0.0, min_trust=1.0, max_trust=1.0)
        flags = numbers[1] | abi.DSOPT_GROUP_NO_BIAS_CORRECTION
        groups.append(((numbers[0], flags, *numbers[2:]), tuple(fields[name] for name in _call.GROUP_REALS)))
    has_master = {entry.param for entry in recipe.layout.entries if entry.name in ("master", "remainder")}
    params = tuple(p._replace(dtype="float32") if i in has_master else p for i, p in enumerate(recipe.params))
    flags = recipe.flags & ~abi.DSOPT_OPTIMIZER_REPORT_NORMS
    return dataclasses.replace(
        recipe, groups=tuple(groups), params=params, flags=flags, masters=abi.DSOPT_MASTERS_PER_TENSOR
    )


def _values_of_direction(values):
    """Returns the values with 1 for each learning rate and without weight decay, except values for which the engine
    skips the step."""
    legal = lambda x, value: jnp.where((x >= 0) & jnp.isfinite(x), value, x)
    given = dict(values)
    if "lr" in given:
        given["lr"] = legal(given["lr"], 1.0)
    if "hyper" in given:
        rows = given["hyper"]
        for place, value in ((abi.DSOPT_HYPER_LR, 1.0), (abi.DSOPT_HYPER_WEIGHT_DECAY, 0.0)):
            rows = rows.at[:, place].set(legal(rows[:, place], value))
        given["hyper"] = rows
    return given


_BLOCK = 256  # elements per scale


class _Scales:
    """The scales of moments, of which every device has those of the whole tensor. A shard of whole blocks has a slice
    of them, which is new after a step; one all-gather for all tensors sends it to the other devices."""

    def __init__(self, entries, starts, axis):
        self.axis, self.parts = axis, {}  # of each entry with scales: where slices begin, whose they are, their size
        for k, entry in enumerate(entries):
            if entry.block > 1 and any(starts[entry.param]):
                blocks = np.array(starts[entry.param]) // _BLOCK  # where the slice of each device begins
                _, first = np.unique(blocks, return_index=True)  # one device per slice, in the order of the slices
                self.parts[k] = blocks.astype(np.int32), first, entry.shape[0] // len(first)

    def of_shard(self, state):
        """Returns the state with the scales of this device's shards."""
        state = list(state)
        for k, (blocks, _, size) in self.parts.items():
            begin = jnp.asarray(blocks)[jax.lax.axis_index(self.axis)]
            state[k] = jax.lax.dynamic_slice(state[k], (begin,), (size,))
        return state

    def of_whole(self, state):
        """Returns the state with the scales of whole tensors."""
        if not self.parts:
            return state
        state = list(state)
        everyone = jax.lax.all_gather(jnp.concatenate([state[k] for k in self.parts]), self.axis)
        begin = 0
        for k, (_, first, size) in self.parts.items():
            state[k] = everyone[first, begin : begin + size].reshape(-1)
            begin += size
        return state


def _has_whole_matrices(param, place) -> bool:
    """Returns True if no matrix of a parameter of Muon is divided among shards. Matrices of consecutive rows are
    intervals of their parameter; others are columns of every shard."""
    split = [d for d, (whole, part) in enumerate(zip(param.shape, place.shape)) if whole != part]
    if not split:
        return True
    cols = {math.prod(param.shape[d:]) for d in range(len(param.shape))}
    has_rows = param.cols in cols or len(param.shape) == 1
    run = math.prod(place.shape[split[-1] :])  # consecutive elements of a shard
    return param.rows > 0 and has_rows and run % (param.rows * param.cols) == 0 and not place.padded


def _starts(recipe, i, place, devices):
    """Returns the index of the first element of each device's shard in parameter i; zeros if it is not used."""
    param = recipe.params[i]
    split = [d for d, (whole, part) in enumerate(zip(param.shape, place.shape)) if whole != part]
    needs = "stochastic_rounding" if recipe.weight_is_random(i) else ""
    if recipe.moment_is_random(i) or recipe.is_scaled(i):
        needs = "the format of a moment"
    if not split or not needs:
        return (0,) * len(devices)
    instead = "set f32_moments for it" if needs != "stochastic_rounding" else "use masters"
    if len(split) > 1 or math.prod(param.shape[: split[0]]) != 1:
        raise _call.unsupported(
            "dsopt.jax: %s needs shards that are intervals of their parameter, and those of %s with shape %s are of "
            "shape %s: shard it along its first dimension only, or %s"
            % (needs, param.name, param.shape, place.shape, instead)
        )
    if recipe.is_scaled(i) and math.prod(place.shape) % _BLOCK:
        raise _call.unsupported(
            "dsopt.jax: moments with scales need shards of a multiple of %d elements, and those of %s with shape %s "
            "have %d: use fewer shards, or %s" % (_BLOCK, param.name, param.shape, math.prod(place.shape), instead)
        )
    indices = place.sharding.devices_indices_map(param.shape)
    size = math.prod(param.shape[split[0] + 1 :])
    return tuple((indices[device][split[0]].start or 0) * size for device in devices)


def _decoded(words):
    """Returns mantissa and exponent of the norms in rows of dsopt_norm_result, and the numbers of Inf and NaN."""
    low, high = words[:, 0], words[:, 1]
    exponent = ((high >> 20) & 0x7FF).astype(jnp.int32)
    fraction = (high & 0xFFFFF).astype(jnp.float32) * 2.0**-20 + low.astype(jnp.float32) * 2.0**-52
    infinite = jnp.where(fraction == 0, jnp.inf, jnp.nan)
    mantissa = jnp.where(exponent == 0x7FF, infinite, jnp.where(exponent == 0, 0.0, 1 + fraction))
    return mantissa, exponent - 1023, words[:, 4].astype(jnp.float32) + words[:, 5].astype(jnp.float32) * 2.0**32


def _hypot(norms):
    """Returns the norm of several tensors from their norms, without overflow of the squares."""
    largest = jnp.max(norms, initial=0.0)
    usual = (largest > 0) & jnp.isfinite(largest)
    scale = jnp.where(usual, largest, 1.0)
    return jnp.where(usual, scale * jnp.sqrt(jnp.sum((norms / scale) ** 2)), largest)
