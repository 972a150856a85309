//! Any one field of an accepted golden case made wrong: the call is refused by a rule of that field, or, where the
//! operator itself does not look, stopped by a lint of it.
//!
//! The contract is asked as the safe layer asks it. Nothing is uploaded or launched.

mod attributes;
mod call;
mod table;
mod tensors;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ascend_attention::spec::TensorDesc;
use ascend_attention::spec::attention_problem::MaskUse;
use ascend_attention::spec::ops::fused_infer_attention_score::{Cache, Route, rules};
use call::{Answer, Call};
use table::TABLE;

/// An accepted call, and what the mutations have to know of it.
#[derive(Debug)]
pub struct Case {
    pub name: String,
    pub call: Call,
    pub query: TensorDesc,
    pub out: TensorDesc,
    pub route: Route,
    pub packed: bool,
    pub cache: Option<Cache>,
    pub batch: i64,
    pub rows: i64,
    pub key_rows: i64,
    pub dim: i64,
    pub rope: bool,
    pub antiquant: bool,
    pub compressed: bool,
    /// Whether the operator looks at the tokens.
    pub window: bool,
    pub kv_heads: i64,
    /// Whether left padding is out of the question.
    pub no_padding: bool,
    pub prefix_rows: i64,
    pub mask_keys: i64,
    pub pse_keys: i64,
    pub blocks_needed: i64,
}

/// A call with one field changed.
#[derive(Debug)]
pub struct Mutation {
    pub field: &'static str,
    pub kind: &'static str,
    pub detail: String,
    pub call: Call,
}

impl Case {
    fn new(name: String, call: Call) -> Self {
        let cache = call.plain.block_table.map(|_| match call.key[0].shape.rank() {
            3 => Cache::BnBsH,
            4 => Cache::BnNBsD,
            _ => Cache::Nz,
        });
        let of_prefix = call
            .plain
            .key_shared_prefix
            .map_or(0, |prefix| prefix.shape[if call.plain.input_layout.starts_with("BN") { 2 } else { 1 }]);
        let bs = call.plain.block_size;
        call.resolved(|checked| {
            let problem = &checked.problem;
            let lens: Vec<i64> = (0..problem.batch).map(|b| problem.kv_len(b) as i64).collect();
            let longest = lens.iter().copied().max().unwrap_or(0);
            let key_rows = problem.key_rows as i64;
            let decode = checked.route == Route::Decode;
            let used = problem.prefix.map_or(0, |prefix| prefix.len as i64);
            let blocks = |len: i64| if bs > 0 { (len + bs - 1) / bs } else { 0 };
            let mask_keys = match (decode, cache) {
                (true, Some(_)) => key_rows,
                (true, None) => longest + used,
                (false, Some(_)) => blocks(longest) * bs,
                (false, None) => key_rows + of_prefix,
            };
            Case {
                name: name.clone(),
                query: call.plain.query.unwrap(),
                out: call.plain.attention_out.unwrap(),
                route: checked.route,
                packed: problem.packed,
                cache,
                batch: problem.batch as i64,
                rows: problem.query_rows as i64,
                key_rows,
                dim: problem.head_dim as i64,
                rope: problem.rope_dim > 0,
                antiquant: problem.key_quantisation.is_some() && problem.query_quantisation.is_none(),
                compressed: problem.mask == MaskUse::Compressed,
                window: call.plain.sparse_mode == 4
                    || call.plain.sparse_mode == 0
                        && call.plain.atten_mask.is_some()
                        && !decode
                        && call.plain.query_padding_size.is_none()
                        && call.plain.kv_padding_size.is_none(),
                kv_heads: problem.kv_heads as i64,
                no_padding: problem.packed
                    || cache.is_some()
                    || call.key.len() > 1
                    || problem.rope_dim > 0
                    || of_prefix > 0,
                prefix_rows: of_prefix,
                mask_keys,
                pse_keys: mask_keys,
                blocks_needed: blocks(longest).max(1),
                call: call.clone(),
            }
        })
    }
}

fn cases() -> Vec<Case> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
    let more = std::env::var_os("ASCEND_VECTORS").map(PathBuf::from);
    let mut cases = BTreeMap::new();
    for root in [Some(own), more].into_iter().flatten() {
        for folder in ["numeric", "quantised", "real"] {
            let Ok(entries) = std::fs::read_dir(root.join(folder)) else {
                continue;
            };
            for path in entries.map(|entry| entry.unwrap().path()) {
                let name = format!("{folder}/{}", path.file_stem().unwrap().to_string_lossy());
                let case = crate::case_files::read(&path).unwrap();
                cases.insert(name, Call::of(&case));
            }
        }
    }
    cases.into_iter().map(|(name, call)| Case::new(name, call)).collect()
}

/// The rows of a table that are about one field made wrong in one way.
fn is(row: &(&str, &str), field: &str, kind: &str) -> bool {
    row.0.split_whitespace().any(|name| name == field) && row.1.split_whitespace().any(|name| name == kind)
}

/// The ids that may answer for a field made wrong in one way.
fn answers(field: &str, kind: &str) -> BTreeSet<&'static str> {
    let rows = TABLE.iter().filter(|row| is(&(row.0, row.1), field, kind));
    rows.flat_map(|row| row.2.split_whitespace()).collect()
}

#[test]
fn a_wrong_field_is_refused_under_its_name() {
    let cases = cases();
    let mut wrong: BTreeMap<String, (usize, String)> = BTreeMap::new();
    let mut tried = 0usize;
    let mut fields = BTreeSet::new();
    let mut hit = BTreeSet::new();
    let mut table = BTreeMap::new();
    for case in &cases {
        let Answer::Lints(before) = case.call.answer() else {
            panic!("{} is not accepted", case.name);
        };
        let mut visit = |mutation: Mutation| {
            tried += 1;
            let Mutation { field, kind, detail, call } = mutation;
            fields.insert((field, kind));
            let allowed = table.entry((field, kind)).or_insert_with(|| answers(field, kind));
            let answer = call.answer();
            let given: Vec<&str> = match &answer {
                Answer::Rule(id) => vec![id],
                Answer::Unsupported(_) => vec!["unsupported"],
                // A refusal of the call before the change is no answer to it.
                Answer::Lints(lints) => lints.iter().copied().filter(|lint| !before.contains(lint)).collect(),
            };
            let mut answering = given.iter().copied().filter(|id| allowed.contains(id)).peekable();
            if answering.peek().is_some() {
                hit.extend(answering.map(|id| (field, kind, id)));
            } else {
                let first = || (0, format!("{} {detail}", case.name));
                wrong.entry(format!("{field} {kind}: {answer:?}")).or_insert_with(first).0 += 1;
            }
        };
        tensors::mutate(case, &mut visit);
        attributes::mutate(case, &mut visit);
    }
    let ids: BTreeSet<&str> = hit.iter().map(|(_, _, id)| *id).collect();
    println!(
        "{} cases, {tried} wrong calls of {} fields and ways, {} rules and lints answered",
        cases.len(),
        fields.len(),
        ids.len()
    );
    for (what, (count, first)) in &wrong {
        println!("{what}: {count}, the first is {first}");
    }
    assert!(wrong.is_empty(), "{} kinds of wrong calls are not answered under their field", wrong.len());
    // With the larger collection, no answer of the table is there for nothing.
    if cases.len() >= 135 {
        for (fields, kinds, answers) in TABLE {
            for id in answers.split_whitespace() {
                let here = |&(field, kind, by): &(&str, &str, &str)| by == id && is(&(fields, kinds), field, kind);
                assert!(hit.iter().any(here), "{id} never answers for {fields} {kinds}");
            }
        }
    }
    // Every case offers a few hundred: fewer calls would mean that something is not tried any more.
    assert!(tried >= 450 * cases.len(), "only {tried} calls");
    assert!(fields.len() >= 250, "only {} fields and ways", fields.len());
}

#[test]
fn the_table_names_what_exists() {
    let ids: BTreeSet<&str> = rules::all().map(|rule| rule.id).chain(["unsupported"]).collect();
    for (field, kind, answers) in TABLE {
        for id in answers.split_whitespace() {
            assert!(ids.contains(id), "{field} {kind}: {id}");
        }
    }
}
