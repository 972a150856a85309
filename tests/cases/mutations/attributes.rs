//! Every attribute and every length array of a call made wrong.

use super::call::Call;
use super::{Case, Mutation};
use ascend_attention::spec::Layout;
use ascend_attention::spec::ops::fused_infer_attention_score::{FiaCall, Route};

/// Numbers that no attribute allows.
const WILD: [i64; 4] = [i64::MIN, i64::MAX, -1, 1 << 40];

/// Adds the mutations of every attribute and every length array of a case.
pub fn mutate(case: &Case, visit: &mut dyn FnMut(Mutation)) {
    heads(case, visit);
    modes(case, visit);
    tokens(case, visit);
    layouts(case, visit);
    lengths(case, visit);
}

type Attribute = for<'a> fn(&'a mut FiaCall<'static>) -> &'a mut i64;

fn each(
    case: &Case,
    field: &'static str,
    of: Attribute,
    values: impl IntoIterator<Item = i64>,
    visit: &mut dyn FnMut(Mutation),
) {
    for value in values {
        let mut call = case.call.clone();
        if *of(&mut call.plain) != value {
            *of(&mut call.plain) = value;
            let detail = value.to_string();
            visit(Mutation { field, kind: "value", detail, call });
        }
    }
}

fn heads(case: &Case, visit: &mut dyn FnMut(Mutation)) {
    let call = &case.call.plain;
    let (n, kv) = (call.num_heads, call.num_key_value_heads);
    let held = if kv == 0 { n } else { kv };
    // BSH does not say how many heads there are: with as many for key and query, another number is another call.
    let hidden = case.query.shape[case.query.shape.rank() - 1];
    let another = |heads: i64| case.query.shape.rank() == 3 && !case.packed && kv == 0 && hidden % heads == 0;
    let values = [n + 1, n - 1, 2 * n, 257, 512].into_iter().filter(|&heads| heads < 1 || !another(heads));
    each(case, "num_heads", |call| &mut call.num_heads, WILD.into_iter().chain([0]).chain(values), visit);
    let values = [held + 1, held - 1, 2 * held, n + 1, 0].into_iter();
    let values = values.filter(|&heads| (heads != 0 || held != n) && heads != held && (heads != 0 || kv != n));
    each(case, "num_key_value_heads", |call| &mut call.num_key_value_heads, WILD.into_iter().chain(values), visit);
}

fn modes(case: &Case, visit: &mut dyn FnMut(Mutation)) {
    let call = &case.call.plain;
    let quantised = case.antiquant;
    let masked = call.atten_mask.is_some();
    let mut sparse = WILD.to_vec();
    sparse.extend(5..=9);
    if !masked {
        // A single row sees every key in mode 3 as well.
        sparse.extend((1..=4).filter(|&mode| mode != 3 || case.route == Route::Prefill));
    } else if !case.compressed {
        sparse.extend(2..=4);
    }
    each(case, "sparse_mode", |call| &mut call.sparse_mode, sparse, visit);
    let precise: &[i64] = if case.route == Route::Decode { &[2, 3, 4, 5] } else { &[4, 5, 6] };
    each(case, "inner_precise", |call| &mut call.inner_precise, WILD.iter().chain(precise).copied(), visit);
    if call.block_table.is_some() {
        let bs = call.block_size;
        each(
            case,
            "block_size",
            |call| &mut call.block_size,
            WILD.into_iter().chain([0, 1, bs + 1, bs * 2, bs / 2, 2048]),
            visit,
        );
    }
    let merged = quantised && call.antiquant_scale.is_some();
    each(
        case,
        "antiquant_mode",
        |call| &mut call.antiquant_mode,
        WILD.into_iter().chain(2..=7).chain((!merged).then_some(1)),
        visit,
    );
    let split = quantised && call.key_antiquant_scale.is_some();
    let wrong =
        |mode: i64| WILD.into_iter().chain((0..=8).filter(move |&other| other != mode && (split || other != 0)));
    each(case, "key_antiquant_mode", |call| &mut call.key_antiquant_mode, wrong(call.key_antiquant_mode), visit);
    each(case, "value_antiquant_mode", |call| &mut call.value_antiquant_mode, wrong(call.value_antiquant_mode), visit);
    each(case, "query_quant_mode", |call| &mut call.query_quant_mode, WILD.into_iter().chain(0..=8), visit);
    each(case, "pse_type", |call| &mut call.pse_type, WILD.into_iter().chain(1..=4), visit);
    if call.softmax_lse.is_none() {
        let mut call = case.call.clone();
        call.plain.softmax_lse_flag = true;
        visit(Mutation { field: "softmax_lse_flag", kind: "value", detail: "true".into(), call });
    }
}

fn tokens(case: &Case, visit: &mut dyn FnMut(Mutation)) {
    let call = &case.call.plain;
    // Modes 2 and 3 have tokens of their own, whatever is given.
    if matches!(call.sparse_mode, 2 | 3) {
        return;
    }
    let values = |other: i64| {
        // Without a window bounds of 0 or more may hide no key.
        let last = if case.window { -other - 1 } else { -1 };
        vec![i64::MIN, -(1 << 40), last]
    };
    each(case, "pre_tokens", |call| &mut call.pre_tokens, values(call.next_tokens), visit);
    each(case, "next_tokens", |call| &mut call.next_tokens, values(call.pre_tokens), visit);
}

fn layouts(case: &Case, visit: &mut dyn FnMut(Mutation)) {
    let strange = ["", "SH", "NSD", "bsh", "BSND ", "TDN", "BNSD_TND"];
    let known = Layout::ALL.iter().map(|layout| layout.as_str());
    for name in strange.into_iter().chain(known) {
        // With as many heads as rows, the axes have the same sizes in another order: another call, and a right one.
        let order = call_order(case, name);
        if order {
            continue;
        }
        let mut call = case.call.clone();
        if call.plain.input_layout != name {
            call.plain.input_layout = name;
            visit(Mutation { field: "input_layout", kind: "value", detail: name.into(), call });
        }
    }
}

/// Whether a layout makes a right call of these shapes as well.
fn call_order(case: &Case, name: &str) -> bool {
    let heads = case.call.plain.num_heads;
    name == "BNSD_BSND" && case.call.plain.input_layout == "BNSD" && heads == case.rows && case.rows > 1
        || name == "BNSD" && case.call.plain.input_layout == "BNSD_BSND" && heads == case.rows
}

type Array = fn(&mut Call) -> &mut Option<Vec<i64>>;

fn lengths(case: &Case, visit: &mut dyn FnMut(Mutation)) {
    let batch = case.batch as usize;
    let arrays: [(&'static str, Array, i64, bool); 2] = [
        ("actual_seq_lengths", |call| &mut call.actual_seq_lengths, case.rows, case.packed),
        (
            "actual_seq_lengths_kv",
            |call| &mut call.actual_seq_lengths_kv,
            case.key_rows,
            case.packed && case.cache.is_none(),
        ),
    ];
    for (field, of, most, cumulative) in arrays {
        let now = of(&mut case.call.clone()).clone();
        let mut put = |kind: &'static str, array: Option<Vec<i64>>| {
            let mut call = case.call.clone();
            let detail = format!("{array:?}");
            *of(&mut call) = array;
            visit(Mutation { field, kind, detail, call });
        };
        let paged = field == "actual_seq_lengths_kv" && case.cache.is_some();
        if case.packed || paged {
            put("null", None);
        }
        if case.packed {
            put("count", Some(vec![]));
        }
        let base = now.unwrap_or_else(|| vec![most; batch]);
        for index in 0..base.len() {
            let with = |value: i64| {
                let mut array = base.clone();
                array[index] = value;
                Some(array)
            };
            for value in [-1, i64::MIN, i64::MAX, most + 1, 1 << 40] {
                put("value", with(value));
            }
            if cumulative && index > 0 && base[index - 1] > 0 {
                put("value", with(base[index - 1] - 1));
            }
        }
        let mut array = base.clone();
        array.push(base.last().copied().unwrap_or(0));
        put("count", Some(array));
        if base.len() > 2 || (case.packed && base.len() > 1) {
            put("count", Some(base[..base.len() - 1].to_vec()));
        }
        if cumulative {
            let mut array = base.clone();
            let last = array.last_mut().unwrap();
            *last -= 1;
            put("value", Some(array));
        }
    }
    let prefix = case.prefix_rows;
    let wrong = if prefix == 0 {
        vec![vec![1], vec![0, 0]]
    } else {
        vec![vec![-1], vec![prefix + 1], vec![i64::MAX], vec![i64::MIN], vec![1, 1]]
    };
    for array in wrong {
        let mut call = case.call.clone();
        call.actual_shared_prefix_len = Some(array.clone());
        let detail = format!("{array:?}");
        visit(Mutation { field: "actual_shared_prefix_len", kind: "value", detail, call });
    }
}
