//! Sparse modes 5 to 8, which attention of training alone has.

use ascend_attention::flash::FlashMask;
use ascend_attention::{FusedInferAttention, Layout, Mask, Masks, Tensor};

fn main() {}

fn of_inference(masks: &Masks<'_>, hidden: Tensor<bool>) -> ascend_attention::Result<()> {
    let attention = FusedInferAttention::new(Layout::Tnd);
    let _ = attention.clone().mask(FlashMask::prefix_matrix(hidden, [3]));
    let _ = attention.clone().mask(FlashMask::prefix(masks, [3])?);
    let _ = attention.clone().mask(FlashMask::last_cut(masks, 8, 0)?);
    let _ = attention.mask(FlashMask::first_cut(masks, 8, 0)?);
    let _: Mask = FlashMask::first_cut(masks, 8, 0)?.into();
    Ok(())
}
