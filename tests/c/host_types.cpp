// What examples of operators take from CANN's libraries beside its C functions: op::fp16_t on the host. Linked as newer
// releases want it, where attention has a library of its own and the runtime another name.
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include "acl/acl.h"
#include "aclnn/opdev/fp16_t.h"

namespace {

int failures = 0;

void check(bool right, const char *what)
{
    if (!right) {
        std::fprintf(stderr, "wrong: %s\n", what);
        ++failures;
    }
}

} // namespace

int main()
{
    // Tensors as examples fill them.
    std::vector<op::fp16_t> ones(3, 1), halves(3, 0.5F), doubles(3, 2.0);
    check(sizeof(op::fp16_t) == 2 && ones[2].val == 0x3c00, "an int");
    check(halves[0].val == 0x3800 && doubles[1].val == 0x4000, "a float and a double");
    check(op::fp16_t(static_cast<uint16_t>(0x3c00)).toFloat() == 1.0F, "bits");

    op::fp16_t half;
    half = static_cast<uint16_t>(3);
    check(half.toFloat() == 3.0F, "a number of 16 bits");
    half = 1.0F + 1.0F / 2048.0F;
    check(half.val == 0x3c00, "a tie goes to the even one");
    half = 65520.0;
    check(half.IsInf() == 1 && half.toInt8() == 127 && half.toUInt16() == 65535, "too large");
    half = static_cast<int64_t>(-100000);
    check(half.IsInf() == -1 && half.toInt32() == std::numeric_limits<int32_t>::min(), "too small");
    half = static_cast<int8_t>(-5);
    check(static_cast<int64_t>(half) == -5 && static_cast<uint32_t>(half) == 0, "a negative number");
    half = 2.5F;
    check(static_cast<int32_t>(half) == 2 && half.toDouble() == 2.5, "an integer is the nearest even one");
    half.val = 0x7e00;
    check(std::isnan(half) && half != half && !(half < ones[0]), "not a number");

    check((ones[0] + halves[0]).toFloat() == 1.5F && (ones[0] - doubles[0]).toFloat() == -1.0F, "sums");
    check((halves[0] * doubles[0]) == ones[0] && (ones[0] / doubles[0]) == halves[0], "products");
    check(ones[0] > halves[0] && ones[0] >= ones[1] && halves[0] < ones[0] && halves[0] <= ones[0], "order");
    check(std::abs(op::fp16_t(-1.5F)) == 1.5F, "absolute value");

    // The same bits as the C type's.
    for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
        op::fp16_t of_bits(static_cast<uint16_t>(bits)), again;
        again = of_bits.toFloat();
        if (of_bits.toFloat() != aclFloat16ToFloat(static_cast<aclFloat16>(bits)) || again.val != bits) {
            check(false, "bits to a number and back");
            break;
        }
    }
    if (failures != 0) {
        return 1;
    }
    std::puts("done");
    return 0;
}
