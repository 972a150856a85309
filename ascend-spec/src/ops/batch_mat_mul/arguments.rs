//! The arguments of BatchMatMul, in its own order.

/// Passes the tokens `$with` and then the table of arguments to the macro `$then`; [`operator`](crate::operator)
/// describes the table's form.
///
/// Source: aclnnBatchMatMul, parameter table.
#[doc(hidden)]
#[macro_export]
#[rustfmt::skip]
macro_rules! batch_mat_mul_arguments {
    ($then:ident $with:tt) => {
        $then! { $with
            1 { self_: tensor, SelfMatrices, "self", "Left factors, `[A, M, K]`." }
            1 { mat2: tensor, Mat2, "mat2",
                "Right factors, `[B, K, N]`, where `A` and `B` are the same or one of them is 1." }
            1 { out: output_mut, Out, "out", "Products, `[max(A, B), M, N]`." }
            1 { cube_math_type: int8 = 0, CubeMathType, "cubeMathType",
                "What the cube units may make of FLOAT: 0 keeps it, 1 allows fewer digits, 2 takes FLOAT16, 3 takes \
                 HFLOAT32." }
        }
    };
}

batch_mat_mul_arguments! { declare_arguments { "BatchMatMul", #[derive(Copy)] BatchMatMulCall } }
