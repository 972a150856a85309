//! Lists of lengths that are cumulative where each request's own are wanted, and the other way round.

use ascend_attention::attention::{CallLengths, Cumulative, PerRequest};

fn main() {
    let ends = Cumulative::new(vec![3, 7]).unwrap();
    let lengths = PerRequest::new(vec![3, 4]).unwrap();
    let _paged = CallLengths::PackedPaged {
        q: &ends,
        kv: &ends,
    };
    let _dense = CallLengths::PackedDense {
        q: &lengths,
        kv: &ends,
    };
    let _converted: Cumulative = lengths;
}
