//! A log-sum-exp to the base 2 where one to the base e is merged.

use ascend_attention::merge::{HostPart, LseLog2, LseNat};

fn main() {
    let _part = HostPart {
        attention: &[1.0][..],
        softmax_lse: LseLog2(&[3.0][..]),
    };
    let _sum: LseNat<f64> = LseLog2(3.0);
    let _mixed = LseNat(3.0) < LseLog2(3.0);
}
