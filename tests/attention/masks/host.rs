//! Masks on the host: their forms, and what is refused.

use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::spec::DType;
use ascend_attention::{CausalOrigin, Error};
use proptest::prelude::*;

use crate::harness::stream;

#[test]
fn rows_that_see_nothing_are_refused_where_they_would_be_nan() {
    let infinite = MaskForm::infinite(DType::Float16).unwrap();
    let masked = |form| HostMask::from_fn(3, 2, form, |i, _| i != 1);
    let refused = masked(infinite).unwrap_err();
    assert!(
        matches!(
            &refused,
            Error::Violation(violation)
                if violation.rule.id == "argument.value"
                    && violation.given.starts_with("form: ")
        ),
        "{refused}"
    );
    assert!(refused.to_string().contains("row 1"), "{refused}");
    let flags = masked(MaskForm::INT8).unwrap();
    assert_eq!(flags.fully_masked_rows().collect::<Vec<_>>(), [(0, 1)]);
    assert!(flags.convert(infinite).is_err());
    let lowest = flags.convert(MaskForm::lowest(DType::Float16).unwrap()).unwrap();
    assert_eq!(lowest.bytes()[4..8], [0xff, 0xfb, 0xff, 0xfb], "-65504, twice");
}

#[test]
fn each_sequence_of_a_stack_has_rows_of_its_own() {
    let sees = |b: usize, i: usize, j: usize| j <= b + i;
    let stack = HostMask::stack_from_fn(2, 2, 3, MaskForm::INT8, sees).unwrap();
    assert_eq!(stack.shape(), [2, 2, 3]);
    assert_eq!(stack.bytes(), [0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0]);
    let infinite = MaskForm::infinite(DType::Float16).unwrap();
    let masked = HostMask::stack_from_fn(2, 1, 3, infinite, |b, _, _| b == 0).unwrap_err();
    assert!(masked.to_string().contains("row 0 of sequence 1"), "{masked}");
    assert!(HostMask::stack_from_fn(usize::MAX, 2, 2, infinite, |_, _, _| true).is_err());
}

#[test]
fn sizes_without_bound_are_refused_before_memory_is_asked_for() {
    let stream = stream();
    let masks = stream.device().masks();
    let refused = masks.causal_matrix(CausalOrigin::LeftUp, 1 << 20, 1 << 20, MaskForm::BOOL).unwrap_err();
    assert!(refused.to_string().contains("sparse modes 2, 3 and 4"), "{refused}");
    assert!(masks.causal_full(CausalOrigin::RightDown, usize::MAX, usize::MAX).is_err());
    assert!(HostMask::from_fn(usize::MAX, 2, MaskForm::INT8, |_, _| true).is_err());
    assert!(masks.causal(CausalOrigin::LeftUp).is_ok());
}

fn forms() -> impl Strategy<Value = MaskForm> {
    let floats = [DType::Float16, DType::Bf16, DType::Float];
    let mut forms = vec![MaskForm::BOOL, MaskForm::INT8, MaskForm::UINT8];
    for dtype in floats {
        forms.push(MaskForm::ones(dtype).unwrap());
        forms.push(MaskForm::infinite(dtype).unwrap());
        forms.push(MaskForm::lowest(dtype).unwrap());
        forms.push(MaskForm::additive(dtype, -10000.0).unwrap());
    }
    proptest::sample::select(forms)
}

proptest! {
    #[test]
    fn every_form_converts_to_every_other_and_back(
        from in forms(), to in forms(), rows in 1usize..8, keys in 1usize..20, bits in proptest::collection::vec(any::<u8>(), 20),
    ) {
        // The first key is always seen, so that no row is fully masked.
        let sees = |i: usize, j: usize| j == 0 || bits[(i * keys + j) / 8] >> ((i * keys + j) % 8) & 1 == 1;
        let mask = HostMask::from_fn(rows, keys, from, sees).unwrap();
        let other = mask.convert(to).unwrap();
        prop_assert_eq!(other.form(), to);
        for i in 0..rows {
            for j in 0..keys {
                prop_assert_eq!(!mask.hides(0, i, j), sees(i, j));
                prop_assert_eq!(!other.hides(0, i, j), sees(i, j));
            }
        }
        prop_assert_eq!(&other.convert(from).unwrap(), &mask);
        // From a formula and from a bitmap: the same elements.
        let formula = HostMask::of(&other.entry(0), from).unwrap();
        prop_assert_eq!(formula.bytes(), mask.bytes());
        let mut bitmap = vec![0; (rows * keys).div_ceil(8)];
        for i in 0..rows * keys {
            bitmap[i / 8] |= u8::from(sees(i / keys, i % keys)) << (i % 8);
        }
        prop_assert_eq!(&HostMask::from_bitmap(rows, keys, from, &bitmap).unwrap(), &mask);
        // A tensor's elements say which form they are in, if they hide anything.
        let read = HostMask::from_elements(from.dtype(), &[rows, keys], mask.bytes()).unwrap();
        prop_assert_eq!(read.bytes(), mask.bytes());
        if mask.bytes().iter().any(|&byte| byte != 0) {
            prop_assert_eq!(read.form(), from);
        }
    }

    #[test]
    fn elements_that_are_no_mask_are_refused(values in proptest::collection::vec(any::<f32>(), 4)) {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let known = |x: f32| x == 0.0 || x == 1.0 || x <= -9984.0;
        let both = values.contains(&1.0) && values.iter().any(|&x| x < 0.0);
        let infinite = values.contains(&f32::NEG_INFINITY) && values.chunks(2).any(|row| row.iter().all(|&x| x != 0.0));
        let read = HostMask::from_elements(DType::Float, &[2, 2], &bytes);
        prop_assert_eq!(read.is_ok(), values.iter().all(|&x| known(x)) && !both && !infinite);
    }
}
