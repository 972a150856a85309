//! The contracts of sparse attention give the operators' own verdicts: with `ASCEND_VECTORS`, on the recorded calls of
//! `verdicts/sparse.jsonl` there.

use ascend_spec::declared::{AnyArguments, DeclaredOperator};
use ascend_spec::operator::{Kind, OwnedValue};
use ascend_spec::{Cann, DType, Dims, Release, Soc, Target, TensorDesc};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

fn desc(value: &Value) -> TensorDesc {
    let shape = value["shape"].as_array().unwrap();
    let shape: Vec<i64> = shape.iter().map(|size| size.as_i64().unwrap()).collect();
    let dtype = DType::from_name(value["dtype"].as_str().unwrap()).unwrap();
    TensorDesc::packed(dtype, Dims::new(&shape).unwrap())
}

/// The call of a line.
fn call(operator: DeclaredOperator, line: &Value) -> AnyArguments<TensorDesc> {
    let mut call = AnyArguments::new(operator);
    for part in ["inputs", "outputs", "attrs"] {
        for (name, value) in line[part].as_object().unwrap() {
            let kind = operator.parameter_named(name).unwrap().kind;
            let integers = || value.as_array().unwrap().iter().map(|n| n.as_i64().unwrap());
            match kind {
                kind if kind.is_tensor() => call.set_tensor(name, desc(value)).unwrap(),
                kind => {
                    let value = match kind {
                        Kind::Float => OwnedValue::Float(value.as_f64().unwrap()),
                        Kind::Flag => OwnedValue::Flag(value.as_bool().unwrap()),
                        Kind::Ints => OwnedValue::Ints(Some(integers().collect())),
                        Kind::Text | Kind::OptionalText => OwnedValue::Text(value.as_str().map(str::to_owned)),
                        _ => OwnedValue::Int(value.as_i64().unwrap()),
                    };
                    call.set_value(name, value).unwrap();
                }
            }
        }
    }
    call
}

#[test]
fn verdicts_of_sparse_operators_agree() {
    let Some(folder) = std::env::var_os("ASCEND_VECTORS") else {
        return;
    };
    let path = Path::new(&folder).join("verdicts/sparse.jsonl");
    let mut counts: BTreeMap<_, [usize; 2]> = BTreeMap::new();
    let mut wrong = Vec::new();
    for line in std::fs::read_to_string(path).unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let Some(operator) = DeclaredOperator::from_name(line["op"].as_str().unwrap()) else {
            continue;
        };
        let call = call(operator, &line);
        let soc = Soc::from_name(line["soc"].as_str().unwrap()).unwrap();
        for (release, expect) in line["expect"].as_object().unwrap() {
            let Some(Release::Known(cann)) = Cann::of_version(release) else {
                panic!("{release}");
            };
            let target = Target::new(soc, cann);
            let accept = expect == "accept";
            let verdict = call.check(1, target, &mut |_| {});
            let status = match &line["status"] {
                Value::Object(releases) => releases.get(release).and_then(Value::as_i64),
                status => status.as_i64(),
            };
            let right = match &verdict {
                Ok(()) => accept,
                Err(refusal) => {
                    assert!(refusal.rule.scope.holds(target), "{refusal} for {target}");
                    let given = i64::from(refusal.status());
                    !accept && status.is_none_or(|status| status == given)
                }
            };
            let count = counts.entry((operator, cann, accept)).or_default();
            count[0] += usize::from(right);
            count[1] += 1;
            if !right {
                wrong.push(format!("{} {target} {status:?}: {verdict:?}", line["id"]));
            }
        }
    }
    for ((operator, cann, accept), [right, all]) in &counts {
        let verdict = if *accept { "accepted" } else { "rejected" };
        println!("{operator:?} {cann}: {right} of {all} {verdict} calls");
    }
    assert!(wrong.is_empty(), "{} wrong verdicts:\n{}", wrong.len(), wrong.join("\n"));
    assert!(!counts.is_empty(), "nothing was judged");
}
