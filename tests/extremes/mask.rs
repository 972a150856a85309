//! Masks on the host and on a device.

use ascend_attention::mask::{CausalOrigin, HostMask, Mask, MaskForm, SlidingWindow};
use ascend_attention::spec::geometry::{TokenTree, Visibility};
use ascend_attention::{DType, Result};

use crate::Call;
use crate::draw::Draw;
use crate::geometry::{bands, local, nonzero, rank_rows};

fn form(draw: &mut Draw) -> MaskForm {
    let dtype = draw.of(&[DType::Float16, DType::Bf16, DType::Float]);
    match draw.below(6) {
        0 => MaskForm::BOOL,
        1 => MaskForm::INT8,
        2 => MaskForm::ones(dtype).unwrap(),
        3 => MaskForm::infinite(dtype).unwrap(),
        4 => MaskForm::lowest(dtype).unwrap(),
        _ => MaskForm::additive(dtype, draw.f64() as f32).unwrap_or(MaskForm::UINT8),
    }
}

/// What a mask can be asked, where asking everything is cheap.
fn ask(mask: Result<HostMask>, draw: &mut Draw) {
    let Ok(mask) = mask else { return };
    let _ = (mask.shape(), mask.hides(draw.usize(), draw.usize(), draw.usize()));
    let entry = mask.entry(draw.usize());
    let (i, j) = (draw.u64(), draw.u64());
    let _ = (entry.q_len(), entry.kv_len(), entry.sees(i, j));
    if mask.bytes().len() > 1 << 12 {
        return;
    }
    let _ = (entry.tile(i..draw.u64(), j..draw.u64()), mask.fully_masked_rows().count());
    let _ = mask.convert(form(draw));
}

fn ask_device<T>(made: Result<T>) {
    // Refused or made: either is an answer.
    drop(made);
}

pub fn origin(draw: &mut Draw) -> CausalOrigin {
    draw.of(&[CausalOrigin::LeftUp, CausalOrigin::RightDown])
}

pub const CALLS: &[Call] = &[
    ("HostMask::of", |draw| {
        let form = form(draw);
        let mask = match draw.below(4) {
            0 => HostMask::of(&bands(draw), form),
            1 => HostMask::of(&local(draw), form),
            2 => HostMask::of(&rank_rows(draw), form),
            _ => {
                let (sizes, part, rows) = draw.triangle();
                HostMask::of(&sizes.geometry(part, rows), form)
            }
        };
        ask(mask, draw);
    }),
    ("HostMask::paint", |draw| {
        let _ = HostMask::paint(&local(draw), form(draw), &mut Vec::new());
    }),
    ("HostMask::stack", |draw| {
        let masks = draw.few(bands);
        let (rows, keys) = (draw.usize(), draw.usize());
        ask(HostMask::stack(&masks, rows, keys, form(draw)), draw);
        let masks = draw.few(rank_rows);
        ask(HostMask::context_parallel(&masks, rows, keys), draw);
    }),
    ("HostMask::from_fn", |draw| {
        let (rows, keys) = (draw.usize(), draw.usize());
        ask(HostMask::from_fn(rows, keys, form(draw), |i, j| i > j), draw);
    }),
    ("HostMask::from_bitmap", |draw| {
        let bitmap = draw.few(|draw| draw.u32() as u8);
        ask(HostMask::from_bitmap(draw.usize(), draw.usize(), form(draw), &bitmap), draw);
    }),
    ("HostMask::from_elements", |draw| {
        let shape = draw.few(Draw::usize);
        let bytes = draw.few(|draw| draw.u32() as u8);
        let dtype = draw.of(&[DType::Bool, DType::Float16, DType::Float, DType::Int64]);
        ask(HostMask::from_elements(dtype, &shape, &bytes), draw);
    }),
    ("Masks of sparse modes", |draw| {
        let device = crate::device();
        let masks = device.masks();
        let window = SlidingWindow::new(draw.usize());
        ask_device(masks.causal(origin(draw)));
        ask_device(masks.band(draw.i64(), draw.i64()));
        ask_device(window.map_err(Into::into).and_then(|window| masks.sliding_window(window)));
        let _ = SlidingWindow::new(draw.usize());
        masks.cache().set_bound(draw.usize());
        let _ = masks.cache().counts();
    }),
    ("Masks as matrices", |draw| {
        let device = crate::device();
        let masks = device.masks();
        let (rows, keys) = (draw.usize(), draw.usize());
        let window = SlidingWindow::new(draw.usize()).or_else(|_| SlidingWindow::new(7));
        ask_device(masks.causal_matrix(origin(draw), rows, keys, form(draw)));
        ask_device(masks.causal_view(origin(draw), rows, keys, form(draw)));
        ask_device(masks.causal_full(origin(draw), rows, keys));
        ask_device(masks.prefix_matrix(draw.usize(), rows, keys, form(draw)));
        ask_device(masks.sliding_window_matrix(window.unwrap(), rows, keys, form(draw)));
        ask_device(masks.local(nonzero(draw), rows, keys));
        ask_device(masks.context_parallel(&draw.few(rank_rows), rows, keys));
        let tree = TokenTree::new(&[-1, 0]).unwrap();
        ask_device(masks.tree(&[tree.behind(draw.u64())], rows, keys));
    }),
    ("Masks of formulas", |draw| {
        let (sizes, part, rows) = draw.triangle();
        ask_device(crate::device().masks().geometry(sizes.geometry(part, rows)));
    }),
    ("Mask", |draw| {
        let tensor = crate::stream().upload(&[0i8; 4], [2, 2]).unwrap();
        let _ = Mask::default_mask(tensor, draw.i64(), draw.i64()).tensor_bytes();
    }),
    ("Masks::custom", |draw| {
        let device = crate::device();
        if let Ok(mask) = HostMask::of(&bands(draw), form(draw)) {
            ask_device(device.masks().custom(&mask));
            ask_device(device.masks().custom_matrix(&mask));
        }
    }),
];
