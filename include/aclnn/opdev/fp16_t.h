/*
 * op::fp16_t, the half-precision type of C++ programs that fill tensors on the host. Its bits are those of ACL_FLOAT16.
 *
 * Conversions, assignments and comparisons are exported by libnnopbase.so; arithmetic is inline here.
 */
#ifndef ASCEND_ACLNN_OPDEV_FP16_T_H
#define ASCEND_ACLNN_OPDEV_FP16_T_H

#include <stdint.h>

#ifdef __cplusplus

#include <cmath>

namespace op {

/* One half. Numbers are rounded to nearest, ties to even; those that are too large become infinite. */
typedef struct tagFp16 {
    uint16_t val;

    tagFp16() : val(0) {}
    tagFp16(const tagFp16 &other) : val(other.val) {}
    /* From bits, not from a number. */
    constexpr tagFp16(const uint16_t &bits) : val(bits) {}
    template <typename T>
    tagFp16(const T &number) : val(0)
    {
        *this = number;
    }

    tagFp16 &operator=(const tagFp16 &other);
    tagFp16 &operator=(const float &number);
    tagFp16 &operator=(const double &number);
    tagFp16 &operator=(const int8_t &number);
    tagFp16 &operator=(const uint8_t &number);
    tagFp16 &operator=(const int16_t &number);
    /* From a number, unlike the constructor. */
    tagFp16 &operator=(const uint16_t &number);
    tagFp16 &operator=(const int32_t &number);
    tagFp16 &operator=(const uint32_t &number);
    tagFp16 &operator=(const int64_t &number);
    tagFp16 &operator=(const uint64_t &number);

    /* Integers are rounded to nearest, ties to even, and saturate. */
    operator float() const;
    operator double() const;
    operator int8_t() const;
    operator uint8_t() const;
    operator int16_t() const;
    operator uint16_t() const;
    operator int32_t() const;
    operator uint32_t() const;
    operator int64_t() const;
    operator uint64_t() const;
    operator bool() const;

    float toFloat();
    double toDouble();
    int8_t toInt8();
    uint8_t toUInt8();
    int16_t toInt16();
    uint16_t toUInt16();
    int32_t toInt32();
    uint32_t toUInt32();

    bool operator==(const tagFp16 &other) const;
    bool operator!=(const tagFp16 &other) const;
    bool operator>(const tagFp16 &other) const;
    bool operator>=(const tagFp16 &other) const;
    bool operator<(const tagFp16 &other) const;
    bool operator<=(const tagFp16 &other) const;

    /* 1 for infinity, -1 for minus infinity, 0 for all else. */
    int IsInf();

    tagFp16 operator+(const tagFp16 other) { return of(toFloat() + static_cast<float>(other)); }
    tagFp16 operator-(const tagFp16 other) { return of(toFloat() - static_cast<float>(other)); }
    tagFp16 operator*(const tagFp16 other) { return of(toFloat() * static_cast<float>(other)); }
    tagFp16 operator/(const tagFp16 other) { return of(toFloat() / static_cast<float>(other)); }
    tagFp16 operator+=(const tagFp16 other) { return *this = *this + other; }
    tagFp16 operator-=(const tagFp16 other) { return *this = *this - other; }
    tagFp16 operator*=(const tagFp16 other) { return *this = *this * other; }
    tagFp16 operator/=(const tagFp16 other) { return *this = *this / other; }

private:
    /* Single precision has more than twice the digits, so that rounding twice is rounding once. */
    static tagFp16 of(float number)
    {
        tagFp16 half;
        half = number;
        return half;
    }
} fp16_t;

} /* namespace op */

namespace std {

inline bool isnan(op::fp16_t value)
{
    return (value.val & 0x7fff) > 0x7c00;
}

inline float abs(op::fp16_t value)
{
    return std::fabs(value.toFloat());
}

} /* namespace std */

#endif /* __cplusplus */

#endif
