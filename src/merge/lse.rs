//! Log-sum-exps with their base.

macro_rules! lse {
    ($(#[$doc:meta])* $name:ident, $other:ident, $convert:ident, $factor:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
        pub struct $name<T>(pub T);

        lse! { @real $name, $other, $convert, $factor, f32 }
        lse! { @real $name, $other, $convert, $factor, f64 }
    };
    (@real $name:ident, $other:ident, $convert:ident, $factor:ident, $real:ident) => {
        impl $name<$real> {
            /// The sum over no keys.
            pub const EMPTY: Self = Self($real::NEG_INFINITY);

            /// Converts the log-sum-exp to the other base.
            pub fn $convert(self) -> $other<$real> {
                $other(self.0 * std::$real::consts::$factor)
            }
        }

        impl $name<Vec<$real>> {
            /// Converts the log-sum-exps to the other base.
            pub fn $convert(self) -> $other<Vec<$real>> {
                let all = self.0.into_iter();
                $other(all.map(|lse| $name(lse).$convert().0).collect())
            }
        }
    };
}

lse! {
    /// A log-sum-exp to the base e, as FusedInferAttentionScore writes it; or several, in a vector, slice or tensor.
    LseNat, LseLog2, to_log2, LOG2_E
}

lse! {
    /// A log-sum-exp to the base 2: `log2(sum(exp(score)))`; or several, in a vector, slice or tensor.
    LseLog2, LseNat, to_nat, LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bases_are_converted_both_ways() {
        assert!((LseNat(8f64.ln()).to_log2().0 - 3.0).abs() < 1e-15);
        assert!((LseLog2(3.0f32).to_nat().0 - 8f32.ln()).abs() < 1e-6);
        assert_eq!(LseNat::<f32>::EMPTY.to_log2(), LseLog2::<f32>::EMPTY);
        assert_eq!(LseLog2(f64::INFINITY).to_nat().0, f64::INFINITY);
        let many = LseNat(vec![0.0f32, f32::NEG_INFINITY]).to_log2();
        assert_eq!(many, LseLog2(vec![0.0, f32::NEG_INFINITY]));
        assert_eq!(many.to_nat(), LseNat(vec![0.0, f32::NEG_INFINITY]));
    }
}
