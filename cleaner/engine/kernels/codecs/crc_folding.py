"""CRC-32C by carry-less products of 512 bits, 256 bytes at a time (VPCLMULQDQ with AVX-512).

Two products with powers of x combine a block of 64 bytes with a later block, so that memory is the
limit. Only multiples of FOLDED_BYTES are folded; crc.py handles the rest, and everything if the
processor has no such products.

Source: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"
(2009), in its reflected form. The constants of the paper are computed here.
"""

import platform
from typing import Any, Final

from llvmlite import binding, ir
from numba import types
from numba.core import config

from cleaner.engine.kernels.codecs.memory import pointer_to
from cleaner.engine.kernels.compile import emitted

POLYNOMIAL: Final = 0x82F63B78  # reflected
_LANES: Final = 8  # words of a block
_BLOCK_BYTES: Final = _LANES * 8
_BLOCKS: Final = 4  # in parallel: a product takes some cycles, and one can start in each cycle
FOLDED_BYTES: Final = _BLOCKS * _BLOCK_BYTES

IS_X86: Final = platform.machine() in {"x86_64", "AMD64"}
_WORD: Final = ir.IntType(64)
_WIDE: Final = ir.VectorType(_WORD, _LANES)
_PRODUCT: Final = "llvm.x86.pclmulqdq.512"
_UPDATE: Final = "llvm.x86.sse42.crc32.64.64"


def compiled_for(feature: str) -> bool:
    """Return whether Numba compiles for processors with `feature`; its settings may pin this."""
    pinned: str | None = vars(config)["CPU_FEATURES"]
    if pinned is not None:
        return f"+{feature}" in pinned.split(",")
    return bool(binding.get_host_cpu_features().get(feature, False))


HAS_WIDE_PRODUCTS: Final = IS_X86 and all(map(compiled_for, ("sse4.2", "avx512f", "vpclmulqdq")))


def _power(exponent: int) -> int:
    """Return x to the power of `exponent` modulo the polynomial, reflected.

    The product of two reflected numbers is one bit too low, so the result is shifted by one.
    """
    power = 1 << 31
    for _ in range(exponent):
        power = (power >> 1) ^ (POLYNOMIAL if power & 1 else 0)
    return power << 1


def _function(builder: Any, name: str, kind: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def _load_block(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    pointer = pointer_to(context, builder, array_type, array, at)
    block = builder.load(builder.bitcast(pointer, _WIDE.as_pointer()))
    block.align = 1
    return block


def _moved(builder: Any, block: Any, distance_bytes: int, onto: Any) -> Any:
    """Return `onto` combined with `block`, which is `distance_bytes` before it."""
    byte = ir.IntType(8)
    product = _function(builder, _PRODUCT, ir.FunctionType(_WIDE, [_WIDE, _WIDE, byte]))
    # The lower half of 128 bits comes first in memory, so its distance is 64 bits larger.
    bits = distance_bytes * 8
    factors = ir.Constant(_WIDE, [_power(bits + 32), _power(bits - 32)] * (_LANES // 2))
    lower = builder.call(product, [block, factors, byte(0x00)])
    upper = builder.call(product, [block, factors, byte(0x11)])
    return builder.xor(builder.xor(lower, upper), onto)


def _reduced(builder: Any, blocks: list[Any]) -> Any:
    """Return the state of the CRC after adjacent blocks."""
    last = blocks[0]
    for block in blocks[1:]:
        last = _moved(builder, last, _BLOCK_BYTES, block)
    update = _function(builder, _UPDATE, ir.FunctionType(_WORD, [_WORD, _WORD]))
    state = _WORD(0)
    for lane in range(_LANES):
        word = builder.extract_element(last, ir.IntType(32)(lane))
        state = builder.call(update, [state, word])
    return state


def _fold(typingctx: Any, crc: Any, array: Any, at: Any, end: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def blocks_at(position: Any) -> list[Any]:
            places = [builder.add(position, _WORD(n * _BLOCK_BYTES)) for n in range(_BLOCKS)]
            of = signature.args[1], args[1]
            return [_load_block(context, builder, *of, place) for place in places]

        first = blocks_at(args[2])
        nothing = ir.Constant(_WIDE, [0] * _LANES)
        before = builder.insert_element(nothing, args[0], ir.IntType(32)(0))
        first[0] = builder.xor(first[0], before)
        begin = builder.add(args[2], _WORD(FOLDED_BYTES))
        entry = builder.block
        head, body, done = (builder.append_basic_block(f"fold.{part}") for part in "123")
        builder.branch(head)

        builder.position_at_end(head)
        position = builder.phi(_WORD)
        sums = [builder.phi(_WIDE) for _ in range(_BLOCKS)]
        builder.cbranch(builder.icmp_signed("<", position, args[3]), body, done)

        builder.position_at_end(body)
        pairs = zip(sums, blocks_at(position), strict=True)
        folded = [_moved(builder, part, FOLDED_BYTES, block) for part, block in pairs]
        following = builder.add(position, _WORD(FOLDED_BYTES))
        builder.branch(head)
        for phi, at_first, later in zip(
            [position, *sums], [begin, *first], [following, *folded], strict=True
        ):
            phi.add_incoming(at_first, entry)
            phi.add_incoming(later, body)

        builder.position_at_end(done)
        return _reduced(builder, sums)

    return types.uint64(types.uint64, array, types.int64, types.int64), codegen


# (state of a CRC, buf, at, end) -> its state after `buf[at:end]`, a positive multiple of
# FOLDED_BYTES. Requires HAS_WIDE_PRODUCTS.
fold_blocks = emitted(_fold)
