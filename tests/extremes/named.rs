//! Sizes that cannot exist, each with the refusal that it gets.

use ascend_attention::mask::{CausalOrigin, HostMask, MaskForm};
use ascend_attention::spec::geometry::{Lengths, LocalChunks, MaskGeometry, Sparsity, Visibility};
use ascend_attention::{DType, FusedInferAttention, Layout, SparseMode, Tensor, f16};

#[test]
fn axes_of_empty_masks_are_bounded_too() {
    let _turn = crate::turn();
    let half = MaskForm::infinite(DType::Float16).unwrap();
    let none: &[LocalChunks] = &[];
    assert!(HostMask::stack(none, 0, usize::MAX, half).is_err());
    assert!(HostMask::from_fn(usize::MAX, 0, half, |_, _| true).is_err());
    let masks = crate::device();
    let masks = masks.masks();
    assert!(masks.causal_matrix(CausalOrigin::LeftUp, 0, 1 << 58, half).is_err());
    assert!(masks.causal_matrix(CausalOrigin::LeftUp, 1 << 58, 0, half).is_err());
    for (rows, keys) in [(0, 1 << 32), (1 << 32, 0)] {
        let mask = HostMask::of(&MaskGeometry::full(rows, keys), MaskForm::INT8).unwrap();
        assert_eq!((mask.bytes().len(), mask.fully_masked_rows().count()), (0, 0));
    }
}

#[test]
fn runs_in_any_order_make_rows_of_the_right_length() {
    struct Wrong;
    impl Visibility for Wrong {
        fn q_len(&self) -> u64 {
            2
        }
        fn kv_len(&self) -> u64 {
            4
        }
        fn each_run(&self, _: u64, visit: &mut dyn FnMut(std::ops::Range<u64>)) {
            #[allow(clippy::reversed_empty_ranges, reason = "what is tried")]
            for run in [2..9, 0..1, 3..1, u64::MAX..0] {
                visit(run);
            }
        }
    }
    let mask = HostMask::of(&Wrong, MaskForm::INT8).unwrap();
    assert_eq!(mask.bytes(), [1, 1, 0, 0, 1, 1, 0, 0]);
}

#[test]
fn formulas_of_any_length_are_counted_at_once() {
    let chunk = std::num::NonZeroU64::MIN;
    let local = LocalChunks::new(chunk, u64::MAX, u64::MAX);
    assert_eq!(local.visible(), u128::from(u64::MAX));
    let lengths = Lengths::Dense { batch: usize::MAX, q_len: 0, kv_len: 1 };
    let band = Sparsity::new(SparseMode::RightDownCausalBand, lengths);
    assert_eq!(band.cut_sequence(), None);
}

#[test]
fn an_empty_query_of_any_number_of_sequences_is_planned_or_refused_at_once() {
    let _turn = crate::turn();
    let stream = crate::stream();
    let key: Tensor<f16> = Tensor::empty(stream.device(), [1, 2, 17, 64]).unwrap();
    for batch in [1 << 32, 1 << 40] {
        let query: Tensor<f16> = Tensor::empty(stream.device(), [batch, 4, 0, 64]).unwrap();
        let call = FusedInferAttention::new(Layout::Bnsd).heads(4);
        let call = call.kv_heads(2).scale(0.1);
        drop(call.plan((&query, &key, &key)));
    }
}
