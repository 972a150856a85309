//! Memory, tensors, block tables and merges.

use ascend_attention::attention::BlockTable;
use ascend_attention::merge::{HostPart, LseNat, MergeState, Part, PartsOfRows, merge_on_host};
use ascend_attention::{DType, Layout, Output, Tensor, f16};

use crate::Call;
use crate::draw::Draw;

fn shape(draw: &mut Draw) -> Vec<usize> {
    (0..draw.below(10)).map(|_| draw.usize()).collect()
}

pub const CALLS: &[Call] = &[
    ("Device::alloc", |draw| {
        let device = crate::device();
        drop(device.alloc::<f16>(draw.usize()));
        drop(device.alloc_zeroed::<i64>(draw.usize()));
        // Between these sizes pinned memory is what the machine has, and its own business.
        let len = draw.usize();
        if !(1 << 20..1 << 40).contains(&len) {
            drop(device.host_buffer::<f32>(len));
        }
    }),
    ("Tensor", |draw| {
        let stream = crate::stream();
        let _ = stream.upload(&[0i8; 4], shape(draw));
        let dtype = draw.of(DType::ALL);
        let _ = stream.upload_bytes(dtype, &[0; 4], shape(draw));
        let tensor = match Tensor::<f16>::empty(stream.device(), shape(draw)) {
            Ok(tensor) => {
                // What is copied below is written first, in pieces that the allocator does not refuse.
                let ones = vec![f16::ONE; 1 << 20];
                let flat = tensor.reshape([tensor.len()]).unwrap();
                for first in (0..tensor.len()).step_by(ones.len()) {
                    let piece = first..tensor.len().min(first + ones.len());
                    let ones = &ones[..piece.len()];
                    let piece = flat.narrow(0, piece).unwrap();
                    piece.overwrite(&stream, ones).unwrap();
                }
                tensor
            }
            Err(_) => stream.upload(&[f16::ONE; 12], [2, 3, 2]).unwrap(),
        };
        let _ = tensor.reshape(shape(draw));
        let _ = tensor.permute(shape(draw));
        if let Ok(part) = tensor.narrow(draw.usize(), draw.usize()..draw.usize()) {
            let _ = part.contiguous(&stream);
        }
        let _ = tensor.bits_as(draw.of(DType::ALL));
        let _ = tensor.padded(&stream, draw.usize());
    }),
    ("BlockTable", |draw| {
        let stream = crate::stream();
        let rows = draw.few(|draw| draw.few(Draw::usize));
        let _ = BlockTable::from_rows(&stream, &rows, draw.usize());
        let _ = BlockTable::with_columns(&stream, &rows, draw.usize(), draw.usize());
        let _ = BlockTable::from_full_rows(&stream, &rows.concat(), draw.usize(), draw.usize());
        let table = BlockTable::zeroed(stream.device(), draw.usize(), draw.usize(), draw.usize());
        if let Ok(table) = table {
            let _ = table.overwrite(&stream, &rows);
            if let Ok(part) = table.rows(draw.usize()..draw.usize()) {
                let _ = part.overwrite(&stream, &rows);
            }
        }
    }),
    ("RowMerge::plan", |draw| {
        let stream = crate::stream();
        let output = Output {
            attention: stream.upload(&[f16::ONE; 32], [2, 1, 16]).unwrap(),
            softmax_lse: Some(stream.upload(&[0f32; 2], [2, 1, 1]).unwrap()),
        };
        let part = Part::of(&output).unwrap();
        let rows = draw.few(|draw| PartsOfRows {
            rows: draw.of(&[0, 1, 2, usize::MAX, usize::MAX - 1]),
            parts: draw.u32() as u16,
        });
        let _ = MergeState::new(Layout::Tnd).rows(&rows).plan(&[part, part]);
    }),
    ("merge_on_host", |draw| {
        let numbers = draw.few(Draw::f64);
        let lse = draw.few(Draw::f64);
        let part = HostPart { attention: &numbers, softmax_lse: LseNat(&lse[..]) };
        let _ = merge_on_host(&[part, part]);
    }),
];
