//! Calls without data: shapes, dtypes, attributes and perhaps the operator's verdict, as lines of JSON.

use ascend_spec::declared::{AnyArguments, DeclaredOperator};
use ascend_spec::operator::Kind;
use ascend_spec::{Cann, Soc, Target, TensorDesc};
use serde_json::{Map, Value, json};

use super::error::shortened;
use super::json::{UniqueNames, desc, described};
use super::{CaseError, metadata};

/// One call described by shapes, dtypes and attributes alone.
///
/// A line has `id`, `inputs` (parameter name to `{"shape", "dtype"}`, with `"strides"` for a tensor that is not
/// packed, to a list of those, or to a list of integers), `attrs`, `outputs`, and optionally what it is judged for:
///
/// | name | meaning |
/// |---|---|
/// | `expect` | `accept` or `reject`, or an object from release (`"9.1.0"`) to one of them |
/// | `soc` | chip, as CANN names it |
/// | `release` | the CANN release that the call is for, and that `expect` is the verdict of |
/// | `op` | operator; without it FusedInferAttentionScore |
/// | `op_version` | version of the operator; without it the oldest that can express the call and is not deprecated |
/// | `status` | CANN's status of a rejected call, or an object from release to status |
/// | `artefact` | `true` if the verdict depends on something that a caller of the C API cannot express |
///
/// `about` is free text. `area`, `family`, `mutations`, `kernel`, `host_crash_x86`, `artefact_why`,
/// `invalid_row_correction` and `run_as_bsh` are labels, which are ignored. Every other name is refused.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterCase {
    /// Stable name.
    pub id: String,
    /// Whether the operator accepts the call according to the line, for each release that has a verdict; `None`
    /// stands for every release.
    pub accepted: Vec<(Option<Cann>, bool)>,
    /// Release that the call is for, also where the line has no verdict.
    pub release: Option<Cann>,
    /// Product that the verdicts are of.
    pub soc: Option<Soc>,
    /// Version of the operator, counted from 1.
    pub version: Option<u8>,
    /// CANN's status of a rejected call, for each release that has one; `None` stands for every release.
    pub statuses: Vec<(Option<Cann>, i64)>,
    /// Whether the verdict is of no use to a caller of the C API.
    pub artefact: bool,
    /// Free text: where the call comes from.
    pub about: String,
    /// The operator, and what it is called with.
    pub arguments: AnyArguments<TensorDesc>,
}

impl ParameterCase {
    /// Reads one line.
    ///
    /// # Errors
    /// [`CaseError::NotJson`] for a line that is no such object, [`CaseError::UnreadArgument`] for an argument that the
    /// named version does not have; the errors of case files for unknown names and values.
    pub fn from_json(line: &str) -> Result<Self, CaseError> {
        let broken = |what: &dyn std::fmt::Display| {
            // The quoted part of the line may hold anything.
            CaseError::NotJson(what.to_string().escape_debug().to_string().replace("\\\"", "\"").replace("\\'", "'"))
        };
        let UniqueNames { repeated } = serde_json::from_str(line).map_err(|error| broken(&error))?;
        if let Some(name) = repeated {
            return Err(broken(&format_args!("the name {:?} stands twice in one object", shortened(&name))));
        }
        let object: Map<String, Value> = serde_json::from_str(line).map_err(|error| broken(&error))?;
        let operator = match object.get("op") {
            Some(Value::String(name)) => {
                DeclaredOperator::from_name(name).ok_or_else(|| CaseError::UnknownOp(name.clone()))?
            }
            _ => DeclaredOperator::FusedInferAttentionScore,
        };
        let mut case = ParameterCase::of(AnyArguments::new(operator));
        for (name, value) in &object {
            let wrong = || {
                let value = shortened(&value.to_string());
                let expected = takes(name).unwrap_or_default();
                broken(&format_args!("`{name}` is {value}; it takes {expected}"))
            };
            match (name.as_str(), value) {
                ("id", Value::String(id)) => case.id.clone_from(id),
                ("expect", value) => case.accepted = read_per_release(value, accepted).ok_or_else(wrong)?,
                ("status", value) => case.statuses = read_per_release(value, Value::as_i64).ok_or_else(wrong)?,
                ("release", Value::String(text)) => {
                    case.release = Some(known(text).ok_or_else(wrong)?);
                }
                ("soc", Value::String(name)) => {
                    case.soc = Some(Soc::from_name(name).ok_or_else(wrong)?);
                }
                ("op_version", Value::Number(number)) => {
                    let number = number.as_u64().and_then(|number| u8::try_from(number).ok());
                    let known = number.filter(|number| operator.version(*number).is_some());
                    case.version = Some(known.ok_or_else(wrong)?);
                }
                ("artefact", Value::Bool(artefact)) => case.artefact = *artefact,
                ("inputs" | "outputs", Value::Object(tensors)) => {
                    for (name, value) in tensors {
                        case.tensor(name, value)?;
                    }
                }
                ("attrs", Value::Object(attributes)) => {
                    for (name, value) in attributes {
                        case.attribute(name, value)?;
                    }
                }
                ("about", Value::String(about)) => case.about.clone_from(about),
                ("op", Value::String(_)) => {}
                (name, _) if LABELS.contains(&name) => {}
                (name, _) if takes(name).is_some() => return Err(wrong()),
                _ => {
                    let known = NAMES.iter().map(|(known, _)| *known);
                    return Err(CaseError::unknown_key(name, known));
                }
            }
        }
        if case.id.is_empty() {
            return Err(CaseError::MissingKey("id"));
        }
        if let Some(version) = case.version {
            CaseError::check_unread(&case.arguments, version)?;
        }
        for (release, _) in &mut case.accepted {
            *release = release.or(case.release);
        }
        if let Some(soc) = case.soc {
            let named = case.accepted.iter().filter_map(|(release, _)| *release);
            for cann in named.chain(case.release) {
                Target::new(soc, cann).released()?;
            }
        }
        Ok(case)
    }

    /// Whether the operator accepts the call on `target` according to the line; `None` if the line has no verdict for
    /// it.
    ///
    /// Atlas A2 and A3 have the same checks: a verdict on one holds for the other.
    pub fn accepted_on(&self, target: Target) -> Option<bool> {
        if !self.soc.is_none_or(|soc| soc.is_kin(target.soc)) {
            return None;
        }
        on_release(&self.accepted, target.cann)
    }

    /// CANN's status of the call on a release that rejects it; `None` if the line has none for it.
    pub fn status_on(&self, cann: Cann) -> Option<i64> {
        on_release(&self.statuses, cann)
    }

    /// A call with these arguments.
    pub(super) fn of(arguments: AnyArguments<TensorDesc>) -> Self {
        Self {
            id: String::new(),
            accepted: Vec::new(),
            release: None,
            soc: None,
            version: None,
            statuses: Vec::new(),
            artefact: false,
            about: String::new(),
            arguments,
        }
    }

    /// Writes the line that [`ParameterCase::from_json`] reads.
    ///
    /// # Errors
    /// [`CaseError::Malformed`] for a number, such as `scale`, that is not finite.
    pub fn to_json(&self) -> Result<String, CaseError> {
        let operator = self.arguments.operator();
        let fused = operator == DeclaredOperator::FusedInferAttentionScore;
        let (mut inputs, mut outputs, mut attributes) = (Map::new(), Map::new(), Map::new());
        for parameter in operator.parameters() {
            let Some(text) = metadata::value_text(&self.arguments, parameter)? else {
                continue;
            };
            let name = parameter.name;
            let value = match parameter.kind {
                Kind::Text | Kind::OptionalText => Value::String(text),
                _ => serde_json::from_str(&text).unwrap_or(Value::String(text)),
            };
            match value {
                Value::Array(_) => inputs.insert(name.to_owned(), value),
                _ => attributes.insert(name.to_owned(), value),
            };
        }
        for parameter in operator.parameters().filter(|parameter| parameter.kind.is_tensor()) {
            let side = match parameter.kind.is_output() {
                true => &mut outputs,
                false => &mut inputs,
            };
            let descriptors = self.arguments.tensors(parameter.name);
            let mut tensors = descriptors.iter().map(described);
            let value: Value = match parameter.kind {
                Kind::TensorList => tensors.collect(),
                _ => tensors.next().unwrap_or_default(),
            };
            if !descriptors.is_empty() {
                side.insert(parameter.name.to_owned(), value);
            }
        }
        let mut line = Map::from_iter([
            ("id".to_owned(), json!(self.id)),
            ("inputs".to_owned(), inputs.into()),
            ("attrs".to_owned(), attributes.into()),
            ("outputs".to_owned(), outputs.into()),
        ]);
        let verdict = |accepted| Value::from(if accepted { "accept" } else { "reject" });
        let optional = [
            ("expect", written_per_release(&self.accepted, verdict)),
            ("release", self.release.map(|release| release.name().into())),
            ("soc", self.soc.map(|soc| soc.chip_name().into())),
            ("op", (!fused).then(|| operator.name().into())),
            ("op_version", self.version.map(Value::from)),
            ("status", written_per_release(&self.statuses, Value::from)),
            ("artefact", self.artefact.then_some(Value::Bool(true))),
            ("about", (!self.about.is_empty()).then(|| self.about.as_str().into())),
        ];
        line.extend(optional.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
        Ok(Value::from(line).to_string())
    }

    fn attribute(&mut self, name: &str, value: &Value) -> Result<(), CaseError> {
        let text = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let operator = self.arguments.operator();
        let unknown = || {
            let values = operator.parameters().filter(|known| !known.kind.is_tensor());
            CaseError::unknown_key(name, values.map(|known| known.name))
        };
        let parameter = operator.parameter_named(name);
        let value = metadata::read_value(parameter.ok_or_else(unknown)?, &text)?.ok_or_else(unknown)?;
        self.arguments.set_value(name, value).map_err(|_| unknown())
    }

    fn tensor(&mut self, name: &str, value: &Value) -> Result<(), CaseError> {
        let operator = self.arguments.operator();
        let unknown = || CaseError::unknown_tensor(name, operator);
        let parameter = operator.parameter_named(name);
        if parameter.is_some_and(|known| known.kind == Kind::Ints) {
            return self.attribute(name, value);
        }
        let parameter = parameter.filter(|known| known.kind.is_tensor());
        let parameter = parameter.ok_or_else(unknown)?;
        let list = match value {
            Value::Array(list) => list.iter().map(|value| desc(name, value)).collect(),
            one => desc(name, one).map(|desc| vec![desc]),
        }?;
        if list.len() != 1 && parameter.kind != Kind::TensorList {
            return Err(CaseError::Shape {
                tensor: name.to_owned(),
                given: format!("{} tensors", list.len()),
                allowed: single(operator),
            });
        }
        for desc in list {
            (self.arguments.set_tensor(name, desc)).map_err(|_| unknown())?;
        }
        Ok(())
    }
}

/// Names whose values are ignored.
const LABELS: [&str; 8] =
    ["area", "family", "mutations", "kernel", "host_crash_x86", "artefact_why", "invalid_row_correction", "run_as_bsh"];

/// The names of a line, and what they take.
const NAMES: [(&str, &str); 12] = [
    ("id", STRING),
    ("op", STRING),
    ("about", STRING),
    ("expect", "`accept` or `reject`, or an object of them by release"),
    ("artefact", "`true` or `false`"),
    ("inputs", TENSORS),
    ("outputs", TENSORS),
    ("attrs", "an object of attributes by name"),
    ("release", "a CANN release"),
    ("soc", "a chip's name"),
    ("op_version", "the number of one of the operator's versions, from 1 on"),
    ("status", "a number, or an object of them by release"),
];
const STRING: &str = "a string";
const TENSORS: &str = "an object of tensors by name";

/// Describes the value that a name takes; `None` for an unknown name.
fn takes(name: &str) -> Option<&'static str> {
    let known = NAMES.iter().find(|(known, _)| *known == name);
    known.map(|(_, takes)| *takes)
}

/// Reads a verdict.
fn accepted(verdict: &Value) -> Option<bool> {
    match verdict.as_str()? {
        "accept" => Some(true),
        "reject" => Some(false),
        _ => None,
    }
}

/// Reads what holds on every release, or an object of what holds on each.
fn read_per_release<T>(value: &Value, read: impl Fn(&Value) -> Option<T>) -> Option<Vec<(Option<Cann>, T)>> {
    match value {
        Value::Object(releases) => {
            releases.iter().map(|(release, value)| Some((Some(known(release)?), read(value)?))).collect()
        }
        value => Some(vec![(None, read(value)?)]),
    }
}

/// Writes what [`read_per_release`] reads; `None` if nothing is known of any release.
fn written_per_release<T: Copy>(values: &[(Option<Cann>, T)], shown: impl Fn(T) -> Value) -> Option<Value> {
    if let (None, value) = *values.first()? {
        return Some(shown(value));
    }
    let by_release = |&(release, value): &(Option<Cann>, T)| Some((release?.name().to_owned(), shown(value)));
    Some(values.iter().filter_map(by_release).collect::<Map<_, _>>().into())
}

/// What holds on a release.
fn on_release<T: Copy>(values: &[(Option<Cann>, T)], cann: Cann) -> Option<T> {
    let found = values.iter().find(|(release, _)| release.is_none_or(|release| release == cann));
    found.map(|&(_, value)| value)
}

/// Reads a release whose contract is known.
fn known(release: &str) -> Option<Cann> {
    release.parse().ok()
}

/// Describes what is allowed where an operator takes one tensor and gets several or none.
fn single(operator: DeclaredOperator) -> String {
    let lists = operator.parameters().filter(|parameter| parameter.kind == Kind::TensorList);
    let lists: Vec<_> = lists.map(|parameter| parameter.name).collect();
    match &*lists {
        [] => format!("one; {} takes no lists of tensors", operator.name()),
        _ => format!("one; the lists of {} are {}", operator.name(), lists.join(" and ")),
    }
}

#[cfg(test)]
mod tests {
    use ascend_spec::operator::Value as ArgumentValue;
    use ascend_spec::ops::fused_infer_attention_score::Version;

    use super::*;

    const LINE: &str = r#"{"id": "one", "expect": "accept", "about": "none",
        "inputs": {"query": {"shape": [1, 4, 8, 64], "dtype": "float16"},
                   "key": {"shape": [1, 2, 16, 64], "dtype": "float16"},
                   "value": [{"shape": [1, 2, 16, 64], "dtype": "float16"}],
                   "actual_seq_lengths_kv": [9]},
        "attrs": {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.125, "input_layout": "BNSD", "pse_type": 0,
                  "softmax_lse_flag": false, "inner_precise": 0},
        "outputs": {"attention_out": {"shape": [1, 4, 8, 64], "dtype": "float16"}}}"#;

    #[test]
    fn a_line_becomes_a_call() {
        let case = ParameterCase::from_json(LINE).unwrap();
        assert_eq!((case.id.as_str(), &case.accepted[..], case.artefact), ("one", &[(None, true)][..], false));
        let AnyArguments::FusedInferAttentionScore(arguments) = &case.arguments else { panic!("{:?}", case.arguments) };
        let call = arguments.call();
        let checked = call.check(Version::V1, Target::snapshot(Soc::AtlasA2)).unwrap();
        let problem = checked.problem;
        assert_eq!((problem.kv_len(0), problem.kv_heads, problem.scale), (9, 2, 0.125));
    }

    #[test]
    fn a_line_says_what_it_is_judged_for() {
        let read = |from: &str, to: &str| ParameterCase::from_json(&LINE.replacen(from, to, 1));
        let on = |case: &ParameterCase, soc, cann| case.accepted_on(Target::new(soc, cann));
        let plain = read("", "").unwrap();
        assert_eq!(on(&plain, Soc::Ascend950, Cann::V9_1), Some(true));

        let releases = r#""soc": "Ascend910_9391", "expect": {"8.5.0": "reject", "9.1.0": "accept"}"#;
        let case = read(r#""expect": "accept""#, releases).unwrap();
        assert_eq!(on(&case, Soc::AtlasA3, Cann::V8_5), Some(false));
        assert_eq!(on(&case, Soc::AtlasA2, Cann::V9_1), Some(true));
        assert_eq!(on(&case, Soc::AtlasA2, Cann::V9_0), None);
        assert_eq!(on(&case, Soc::Ascend950, Cann::V9_1), None);
        let again = ParameterCase::from_json(&case.to_json().unwrap()).unwrap();
        assert_eq!(again, ParameterCase { about: again.about.clone(), ..case });

        let one =
            r#""release": "9.1.0", "op_version": 5, "status": 561002, "host_crash_x86": ["9.1.0"], "expect": "reject""#;
        let case = read(r#""expect": "accept""#, one).unwrap();
        assert_eq!(on(&case, Soc::AtlasA2, Cann::V9_1), Some(false));
        assert_eq!(on(&case, Soc::AtlasA2, Cann::V9_0), None);
        assert_eq!(case.version, Some(5));
        assert_eq!(case.status_on(Cann::V9_1), Some(561_002));

        let both = r#""status": {"9.1.0": 561002, "9.2.0": 561103}, "expect": "reject""#;
        let case = read(r#""expect": "accept""#, both).unwrap();
        assert_eq!(case.status_on(Cann::V9_1), Some(561_002));
        assert_eq!(case.status_on(Cann::V9_2), Some(561_103));
        assert_eq!(case.status_on(Cann::V9_0), None);
        let again = ParameterCase::from_json(&case.to_json().unwrap()).unwrap();
        assert_eq!(again.statuses, case.statuses);

        let sink = r#""op_version": 1, "inputs": {"learnable_sink": {"shape": [4], "dtype": "bfloat16"}, "#;
        let error = read(r#""inputs": {"#, sink).unwrap_err();
        assert!(error.to_string().starts_with("version 1 of the operator has no argument `learnable_sink`"), "{error}");
        read(r#""inputs": {"#, &sink.replace(r#": 1, "i"#, r#": 5, "i"#)).unwrap();
        for wrong in [r#""op_version": 6"#, r#""release": "9.7.0""#, r#""soc": "Kunpeng""#] {
            let error = read(r#""id""#, &format!(r#"{wrong}, "id""#)).unwrap_err();
            assert!(matches!(error, CaseError::NotJson(_)), "{error}");
        }
    }

    #[test]
    fn a_line_of_another_operator_becomes_its_call() {
        let line = r#"{"id": "merge", "op": "ring_attention_update", "op_version": 2, "expect": "reject", "status": 161001,
            "inputs": {"prev_attn_out": {"shape": [5, 2, 64], "dtype": "float16"}},
            "attrs": {"input_layout": "SBH", "input_softmax_layout": ""},
            "outputs": {"attn_out": {"shape": [5, 2, 64], "dtype": "float16"}}}"#;
        let case = ParameterCase::from_json(line).unwrap();
        assert_eq!(case.arguments.operator(), DeclaredOperator::RingAttentionUpdate);
        assert_eq!(case.arguments.tensors("attn_out").len(), 1);
        let layout = case.arguments.value("input_softmax_layout");
        assert_eq!(layout, Some(ArgumentValue::Text(Some(""))));
        let again = ParameterCase::from_json(&case.to_json().unwrap()).unwrap();
        assert_eq!(again, case);
        for (from, to, says) in [
            ("\"ring_attention_update\"", "\"ring\"", "unknown op \"ring\""),
            ("\"op_version\": 2", "\"op_version\": 3", "op_version"),
            ("\"attn_out\"", "\"attention_out\"", "attention_out"),
            ("\"input_layout\"", "\"num_heads\"", "num_heads"),
        ] {
            let wrong = ParameterCase::from_json(&line.replacen(from, to, 1));
            let error = wrong.unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        for (from, to, says) in [
            ("\"about\"", "\"colour\"", "colour"),
            ("\"query\"", "\"quarry\"", "quarry"),
            ("\"inner_precise\"", "\"outer_precise\"", "outer_precise"),
            ("\"accept\"", "\"perhaps\"", "expect"),
            ("float16", "float17", "float17"),
            ("[1, 4, 8, 64]", "[1, 4, \"8\", 64]", "shape"),
            ("[9]", "[9.5]", "actual_seq_lengths_kv"),
            ("\"id\": \"one\",", "", "id"),
            ("{\"id\"", "[\"id\"", "expected"),
        ] {
            let line = LINE.replacen(from, to, 1);
            let error = ParameterCase::from_json(&line).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
