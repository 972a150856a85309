//! What calls are made of besides tensors: lengths, slots, captures.

use ascend_attention::attention::{Cumulative, PerRequest};
use ascend_attention::graph::{CaptureEstimate, KeyLimits};
use ascend_attention::scatter::{CacheOrder, ScatterPaKvCache, SlotMapping};
use ascend_attention::{RangeReport, f16};

use crate::Call;
use crate::draw::Draw;

pub const CALLS: &[Call] = &[
    ("Cumulative and PerRequest", |draw| {
        let _ = PerRequest::new(draw.few(Draw::usize));
        let _ = Cumulative::from_with_zero(&draw.few(Draw::usize));
        if let Ok(ends) = Cumulative::new(draw.few(Draw::usize)) {
            let _ = (ends.split_at(draw.usize()), ends.with_zero(), ends.total());
            let _ = ends.per_request().cumulative();
            let _ = ends.clone().push_end(draw.usize());
        }
        let lengths = draw.few(|draw| draw.usize().min(PerRequest::MAX_LENGTH));
        let lengths = PerRequest::new(lengths).unwrap();
        let _ = lengths.clone().push(draw.usize());
        let _ = (lengths.cumulative(), lengths.split_at(draw.usize()));
    }),
    ("CaptureEstimate", |draw| {
        let estimate = CaptureEstimate::new(draw.usize(), draw.usize());
        let _ = (estimate.events(), estimate.fits(draw.usize()));
        let _ = CaptureEstimate::most_graphs(draw.usize(), draw.usize());
    }),
    ("KeyLimits", |draw| {
        let limits = KeyLimits { keys: draw.usize(), blocks: draw.usize(), block_size: draw.usize() };
        let _ = limits.admits(&draw.few(Draw::usize));
    }),
    ("RangeReport", |draw| {
        let _ = RangeReport::of(&draw.few(Draw::f64), draw.f64());
    }),
    ("SlotMapping", |draw| {
        let stream = crate::stream();
        let slots = draw.few(Draw::i64);
        let of = draw.usize();
        if let Ok(mapping) = SlotMapping::new(&stream, &slots, of) {
            let _ = mapping.overwrite(&stream, &draw.few(Draw::i64));
            let cache = stream.upload(&[f16::ONE; 16], [2, 2, 1, 4]).unwrap();
            let rows = stream.upload(&vec![f16::ONE; slots.len() * 4], [slots.len(), 1, 4]).unwrap();
            let order = draw.of(&[CacheOrder::Norm, CacheOrder::PaNz]);
            let _ = ScatterPaKvCache::new().cache_order(order).plan((&rows, &mapping, &cache));
        }
    }),
];
