//! The square that causal masks share is no larger than they are worth.

use crate::harness::stream;
use ascend_attention::CausalOrigin;
use ascend_attention::mask::MaskForm;

#[test]
fn a_few_rows_over_many_keys_make_no_square_of_the_keys() {
    let stream = stream();
    let masks = stream.device().masks();
    for origin in [CausalOrigin::RightDown, CausalOrigin::LeftUp] {
        let mask = masks.causal_full(origin, 3, 65_536).unwrap();
        assert_eq!(mask.tensor_bytes(), 3 * 65_536);
        let view = masks.causal_view(origin, 5, 40_000, MaskForm::BOOL).unwrap();
        assert!(view.shape() == [5, 40_000] && view.is_contiguous());
        let first = |i: usize| match origin {
            CausalOrigin::RightDown => i + 40_000 - 5,
            CausalOrigin::LeftUp => i,
        };
        let bytes = view.download_bytes(&stream).unwrap();
        for (i, row) in bytes.chunks(40_000).enumerate() {
            let hides = |(j, &byte): (usize, &u8)| byte == u8::from(j > first(i));
            assert!(row.iter().enumerate().all(hides), "row {i}");
        }
    }
}
