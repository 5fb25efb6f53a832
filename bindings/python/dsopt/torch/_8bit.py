# SPDX-License-Identifier: Apache-2.0
"""AdamW8bit and Adam8bit with the arguments of bitsandbytes."""
from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from ._adam import AdamW
from ._formats import MIN_8BIT_SIZE
from ._ranks import rows
from ._tensors import unsupported

ARGUMENTS = """
    params               parameters, or dicts of parameters with separate values of the arguments below; a group with
                         exp_avg_format="f32" and exp_avg_sq_format="f32" has float32 moments, as for embeddings
    lr                   learning rate; a number, or a tensor that is read in each step
    betas                decay of the running means of gradients and of their squares
    eps                  added to the root of the second mean
    weight_decay         decoupled decay per step, times lr
    amsgrad              must be False
    optim_bits           no effect: the moments have 8 bits
    args                 None, or an object whose min_8bit_size is used
    min_8bit_size        a tensor with fewer elements has float32 moments
    is_paged             must be False
    percentile_clipping  must be 100
    block_wise           no effect: there is a scale per 256 elements
    stochastic_rounding  True: bfloat16 parameters are rounded up or down with a probability proportional to the
                         distance, so that small updates are not lost; float32 ones are exact
    seed                 of the random numbers, a whole number in [0, 2^64)
    masters              of 16-bit parameters: None; "float32": copies in the state; "remainder": 16 more bits in
                         the state, with which a bfloat16 parameter is its own master
    """ + rows(25)
REFUSED = {"is_paged": (False, "its state stays on the device of the parameters"),
           "percentile_clipping": (100, "clip with torch.nn.utils.clip_grad_norm_"),
           "max_unorm": (0, "leave it out"), "skip_zeros": (False, "leave it out")}


class AdamW8bit(AdamW):
    __doc__ = """bitsandbytes.optim.AdamW8bit: AdamW with both moments in the format "q8". load_state_dict also loads
    state of bitsandbytes.
    """ + ARGUMENTS

    def __init__(self, params: Any, lr: Any = 1e-3, betas: Tuple[Any, Any] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, amsgrad: bool = False, optim_bits: int = 32, args: Any = None,
                 min_8bit_size: int = MIN_8BIT_SIZE, *, is_paged: bool = False, percentile_clipping: int = 100,
                 block_wise: bool = True, stochastic_rounding: bool = False, seed: int = 0,
                 masters: Optional[str] = None, group: Any = None, shard: Any = False, average: bool = False,
                 node_group: Any = None, max_grad_norm: float = 0.,
                 check_ranks: bool = False) -> None:
        given: Dict[str, Any] = {"is_paged": is_paged, "percentile_clipping": percentile_clipping}
        for name, (only, instead) in REFUSED.items():
            for where, value in (("", given.get(name, only)), ("args.", getattr(args, name, only))):
                if value != only:
                    raise unsupported("%s: %s%s=%r is not supported; %s" %
                                      (type(self).__name__, where, name, value, instead))
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, stochastic_rounding=stochastic_rounding,
                         seed=seed, exp_avg_format="q8", exp_avg_sq_format="q8",
                         min_8bit_size=getattr(args, "min_8bit_size", min_8bit_size), masters=masters, group=group,
                         shard=shard, average=average, node_group=node_group, max_grad_norm=max_grad_norm,
                         check_ranks=check_ranks)


class Adam8bit(AdamW8bit):
    __doc__ = """bitsandbytes.optim.Adam8bit: AdamW8bit without decay by default, which is decoupled as in the original.
    """ + ARGUMENTS

    def __init__(self, params: Any, lr: Any = 1e-3, betas: Tuple[Any, Any] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0, amsgrad: bool = False, optim_bits: int = 32, args: Any = None,
                 min_8bit_size: int = MIN_8BIT_SIZE, *, is_paged: bool = False, percentile_clipping: int = 100,
                 block_wise: bool = True, stochastic_rounding: bool = False, seed: int = 0,
                 masters: Optional[str] = None, group: Any = None, shard: Any = False, average: bool = False,
                 node_group: Any = None, max_grad_norm: float = 0.,
                 check_ranks: bool = False) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, optim_bits, args, min_8bit_size,
                         is_paged=is_paged, percentile_clipping=percentile_clipping, block_wise=block_wise,
                         stochastic_rounding=stochastic_rounding, seed=seed, masters=masters, group=group,
                         shard=shard, average=average, node_group=node_group, max_grad_norm=max_grad_norm,
                         check_ranks=check_ranks)
