//! The metadata of a case: the keys that every operator's cases have, and the arguments that are no tensors.

use std::collections::BTreeMap;

use ascend_spec::declared::{AnyArguments, DeclaredOperator};
use ascend_spec::operator::{Kind, OwnedValue, ParameterInfo, Value};
use ascend_spec::{Cann, DType};

use super::stored::{STORED, Stored};
use super::{Case, CaseError, Expect, MaskSource, Tolerance};

const FORMAT: &str = "ascend-attention-case";
const VERSION: &str = "1";

/// What a key gives that is no argument of the operator: a field of the case.
enum Field {
    /// A text; a case does without an empty one.
    Text(fn(&mut Case<()>) -> &mut String),
    OptionalText(fn(&mut Case<()>) -> &mut Option<String>),
    Release(fn(&mut Case<()>) -> &mut Option<Cann>),
    /// A distance on its own.
    Distance(fn(&mut Case<()>) -> &mut Option<f64>),
    /// The absolute part of a tolerance.
    Atol(fn(&mut Case<()>) -> &mut Option<Tolerance>),
    /// The relative part of a tolerance.
    Rtol(fn(&mut Case<()>) -> &mut Option<Tolerance>),
    Strides,
    /// A field with its own functions; the one that writes returns `None` if the case does without the key.
    Own(fn(&mut Case<()>, DeclaredOperator, &str) -> Result<(), CaseError>, fn(&Case<()>) -> Option<String>),
}

/// The keys in the order in which they are read, whatever their order in the file.
const KEYS: [(&str, Field); 28] = [
    ("name", Field::Text(|case| &mut case.name)),
    ("note", Field::Text(|case| &mut case.note)),
    ("atten_mask_kind", Field::Own(read_mask_kind, written_mask_kind)),
    ("expect", Field::Own(read_expect, written_expect)),
    ("expect_status", Field::Own(read_status, written_status)),
    ("expect_rule", Field::OptionalText(|case| &mut case.expect_rule)),
    ("atol", Field::Atol(|case| &mut case.tolerance)),
    ("rtol", Field::Rtol(|case| &mut case.tolerance)),
    ("softmax_atol", Field::Atol(|case| &mut case.softmax_tolerance)),
    ("softmax_rtol", Field::Rtol(|case| &mut case.softmax_tolerance)),
    ("state_atol", Field::Atol(|case| &mut case.state_tolerance)),
    ("state_rtol", Field::Rtol(|case| &mut case.state_tolerance)),
    ("exact_atol", Field::Atol(|case| &mut case.exact_tolerance)),
    ("exact_rtol", Field::Rtol(|case| &mut case.exact_tolerance)),
    ("exact_state_atol", Field::Atol(|case| &mut case.exact_state_tolerance)),
    ("exact_state_rtol", Field::Rtol(|case| &mut case.exact_state_tolerance)),
    ("state_rms_rtol", Field::Distance(|case| &mut case.state_rms_rtol)),
    ("state_strides", Field::Strides),
    ("conv_states_strides", Field::Strides),
    ("provider", Field::OptionalText(|case| &mut case.provider)),
    ("rms_rtol", Field::Distance(|case| &mut case.rms_rtol)),
    ("soc", Field::OptionalText(|case| &mut case.soc_name)),
    ("cann", Field::Release(|case| &mut case.cann)),
    ("portable_since", Field::Release(|case| &mut case.portable_since)),
    ("op_version", Field::Own(read_version, |case| Some(case.op_version?.to_string()))),
    ("out_dtype", Field::Own(read_out_dtype, |case| case.out_dtype.map(dtype_name))),
    ("group", Field::Own(read_group, |case| Some(case.group.as_ref()?.0.clone()))),
    ("group_role", Field::Own(read_group_role, |case| Some(case.group.as_ref()?.1.clone()))),
];

impl Field {
    /// Reads the value of a key.
    fn read(
        &self,
        case: &mut Case<()>,
        operator: DeclaredOperator,
        key: &'static str,
        text: &str,
    ) -> Result<(), CaseError> {
        match self {
            Field::Text(field) => text.clone_into(field(case)),
            Field::OptionalText(field) => *field(case) = Some(text.to_owned()),
            Field::Release(field) => *field(case) = Some(release(key, text)?),
            Field::Distance(field) => *field(case) = Some(distance(key, text)?),
            Field::Atol(field) => field(case).get_or_insert_default().atol = distance(key, text)?,
            Field::Rtol(field) => field(case).get_or_insert_default().rtol = distance(key, text)?,
            Field::Strides => {
                let strides = serde_json::from_str(text);
                let malformed = |_| CaseError::malformed(key, text, "a JSON list of integers");
                case.state_strides = Some(strides.map_err(malformed)?);
            }
            Field::Own(read, _) => read(case, operator, text)?,
        }
        Ok(())
    }

    /// Returns the value of a key; `None` if the case does without.
    fn written(&self, case: &mut Case<()>, key: &'static str) -> Result<Option<String>, CaseError> {
        let number = match self {
            Field::Text(field) => return Ok(Some(field(case).clone()).filter(|text| !text.is_empty())),
            Field::OptionalText(field) => return Ok(field(case).clone()),
            Field::Release(field) => return Ok(field(case).map(|cann| format!("{}.0", cann.name()))),
            Field::Strides => return Ok(case.state_strides.as_ref().map(|strides| format!("{strides:?}"))),
            Field::Own(_, written) => return Ok(written(case)),
            Field::Distance(field) => *field(case),
            Field::Atol(field) => field(case).map(|tolerance| tolerance.atol),
            Field::Rtol(field) => field(case).map(|tolerance| tolerance.rtol),
        };
        let Some(text) = number.map(shown) else { return Ok(None) };
        distance(key, &text)?;
        Ok(Some(text))
    }
}

fn read_mask_kind(case: &mut Case<()>, _: DeclaredOperator, text: &str) -> Result<(), CaseError> {
    let kind = MASK_KINDS.iter().find(|(_, name)| *name == text);
    let malformed = || CaseError::malformed("atten_mask_kind", text, "`none`, `tensor` or `compressed`");
    (case.mask, _) = *kind.ok_or_else(malformed)?;
    Ok(())
}

fn written_mask_kind(case: &Case<()>) -> Option<String> {
    let kind = MASK_KINDS.iter().find(|(kind, _)| *kind == case.mask);
    kind.map(|(_, name)| (*name).to_owned())
}

fn read_expect(case: &mut Case<()>, _: DeclaredOperator, text: &str) -> Result<(), CaseError> {
    case.expect = match text {
        "ok" => Expect::Ok,
        "reject" => Expect::Reject { status: None },
        _ => return Err(CaseError::malformed("expect", text, "`ok` or `reject`")),
    };
    Ok(())
}

fn written_expect(case: &Case<()>) -> Option<String> {
    (case.expect != Expect::Ok).then(|| "reject".to_owned())
}

fn read_status(case: &mut Case<()>, _: DeclaredOperator, text: &str) -> Result<(), CaseError> {
    let key = "expect_status";
    let code = i32::try_from(integer(key, text)?);
    let code = code.map_err(|_| CaseError::malformed(key, text, "an integer of 32 bits"))?;
    let Expect::Reject { status } = &mut case.expect else {
        return Err(CaseError::Contradiction(
            "there is an `expect_status`, but `expect` is not `reject`: leave it out, or expect the refusal",
        ));
    };
    *status = Some(code);
    Ok(())
}

fn written_status(case: &Case<()>) -> Option<String> {
    match case.expect {
        Expect::Reject { status } => Some(status?.to_string()),
        Expect::Ok => None,
    }
}

fn read_version(case: &mut Case<()>, operator: DeclaredOperator, text: &str) -> Result<(), CaseError> {
    let most = operator.versions().count();
    let number = (1..=most).find(|number| number.to_string() == text);
    let number = number.and_then(|number| u8::try_from(number).ok());
    let known = || {
        let allowed = match most {
            1 => "1",
            2 => "1 or 2",
            3 => "1 to 3",
            4 => "1 to 4",
            _ => "1 to 5",
        };
        CaseError::malformed("op_version", text, allowed)
    };
    case.op_version = Some(number.ok_or_else(known)?);
    Ok(())
}

fn read_out_dtype(case: &mut Case<()>, _: DeclaredOperator, text: &str) -> Result<(), CaseError> {
    let dtype = DType::ALL.iter().find(|dtype| dtype_name(**dtype) == text);
    let unknown = || CaseError::malformed("out_dtype", text, "an element type, such as `int8`");
    case.out_dtype = Some(*dtype.ok_or_else(unknown)?);
    Ok(())
}

fn read_group(case: &mut Case<()>, _: DeclaredOperator, text: &str) -> Result<(), CaseError> {
    case.group = Some((text.to_owned(), String::new()));
    Ok(())
}

fn read_group_role(case: &mut Case<()>, _: DeclaredOperator, text: &str) -> Result<(), CaseError> {
    let (_, role) = case.group.as_mut().ok_or(GROUP)?;
    text.clone_into(role);
    Ok(())
}

const GROUP: CaseError = CaseError::Contradiction("`group` and `group_role` go together: give both, or neither");

/// A truth value in files, and in some operators an integer.
const LSE_FLAG: &str = "softmax_lse_flag";

/// Mask kinds with their names in files.
const MASK_KINDS: [(MaskSource, &str); 3] =
    [(MaskSource::None, "none"), (MaskSource::Tensor, "tensor"), (MaskSource::Compressed, "compressed")];

/// Whether cases of an operator have a key.
pub(super) fn takes(operator: DeclaredOperator, key: &str) -> bool {
    let inference = operator == DeclaredOperator::FusedInferAttentionScore;
    let has = |parameter| operator.parameter_named(parameter).is_some();
    match key {
        "atten_mask_kind" => has("atten_mask"),
        "portable_since" => inference,
        "rms_rtol" => inference || has("final_state"),
        "state_rms_rtol" | "exact_atol" | "exact_rtol" | "exact_state_atol" | "exact_state_rtol" => has("final_state"),
        "state_atol" | "state_rtol" | "provider" => has("state") || has("final_state") || has("conv_states"),
        "state_strides" => has("state"),
        // CausalConv1d reads contiguous lines alone.
        "conv_states_strides" => has("conv_states") && operator != DeclaredOperator::CausalConv1d,
        "out_dtype" => inference || operator == DeclaredOperator::PromptFlashAttention,
        "softmax_atol" | "softmax_rtol" => has("softmax_max") || operator == DeclaredOperator::BlockSparseAttention,
        "group" | "group_role" => has("softmax_max") || has("state") || has("final_state"),
        _ => true,
    }
}

/// The operator that the metadata of a file names.
pub(super) fn operator(metadata: &BTreeMap<String, String>) -> Result<DeclaredOperator, CaseError> {
    let find = |key: &'static str| metadata.get(key).map(String::as_str).ok_or(CaseError::MissingKey(key));
    // `format`, `version` and `op` come first: they decide what the other keys mean.
    if let Some(format) = Some(find("format")?).filter(|format| *format != FORMAT) {
        return Err(CaseError::UnknownFormat(format.to_owned()));
    }
    if let Some(version) = Some(find("version")?).filter(|version| *version != VERSION) {
        return Err(CaseError::UnknownVersion(version.to_owned()));
    }
    let op = find("op")?;
    DeclaredOperator::from_name(op).ok_or_else(|| CaseError::UnknownOp(op.to_owned()))
}

/// Reads the metadata of a case of an operator. Also returns the element types of tensors that are stored as U8.
pub(super) fn read(
    metadata: &BTreeMap<String, String>,
    operator: DeclaredOperator,
) -> Result<(Case, Stored), CaseError> {
    let mut arguments = AnyArguments::new(operator);
    let mut stored = Stored::default();
    for (key, value) in metadata {
        let foreign = || CaseError::ForeignKey { key: key.clone(), op: operator.name() };
        if let Some(parameter) = operator.parameter_named(key)
            && let Some(value) = read_value(parameter, value)?
        {
            (arguments.set_value(key, value)).map_err(|_| foreign())?;
            continue;
        }
        match key.as_str() {
            "format" | "version" | "op" => {}
            _ if KEYS.iter().any(|(known, _)| known == key) => {
                if !takes(operator, key) {
                    return Err(foreign());
                }
            }
            _ => match key.strip_prefix(STORED) {
                Some(tensor) => stored.insert_type(tensor, value)?,
                None if is_any_argument(key) => return Err(foreign()),
                None => {
                    let own = operator.parameters().map(|known| known.name);
                    let known = own.chain(KEYS.iter().map(|(known, _)| *known));
                    return Err(CaseError::unknown_key(key, known));
                }
            },
        }
    }
    let mut case = Case::default();
    for (key, field) in &KEYS {
        if let Some(value) = metadata.get(*key) {
            field.read(&mut case, operator, key, value)?;
        }
    }
    match &case.group {
        Some((_, role)) if role.is_empty() => Err(GROUP),
        _ => Ok((case.with(arguments, Vec::new()), stored)),
    }
}

/// Writes the metadata of a case of an operator, without its arguments.
pub(super) fn write(
    mut case: Case<()>,
    operator: DeclaredOperator,
) -> Result<BTreeMap<&'static str, String>, CaseError> {
    let mut entries = BTreeMap::from([
        ("format", FORMAT.to_owned()),
        ("version", VERSION.to_owned()),
        ("op", operator.name().to_owned()),
    ]);
    for (key, field) in KEYS.iter().filter(|(key, _)| takes(operator, key)) {
        let text = field.written(&mut case, key)?;
        entries.extend(text.map(|text| (*key, text)));
    }
    Ok(entries)
}

/// Whether some operator has an argument of this name that is no tensor.
fn is_any_argument(key: &str) -> bool {
    let mut operators = DeclaredOperator::ALL.iter();
    operators.any(|operator| {
        let parameter = operator.parameter_named(key);
        parameter.is_some_and(|parameter| !parameter.kind.is_tensor())
    })
}

/// A release; with a plus sign behind it the next one, for what came after it and before the next had a name.
fn release(key: &'static str, value: &str) -> Result<Cann, CaseError> {
    let (name, later) = value.strip_suffix('+').map_or((value, false), |name| (name, true));
    let named = name.parse::<Cann>().ok();
    let next = |named: Cann| Cann::ALL.into_iter().find(|cann| *cann > named);
    let release = if later { named.and_then(next) } else { named };
    release.ok_or_else(|| {
        let allowed = "a release whose contract is known: 8.1 to 9.1, and 9.2 as a preview";
        CaseError::malformed(key, value, allowed)
    })
}

/// The name of an element type in the metadata.
fn dtype_name(dtype: DType) -> String {
    match dtype {
        DType::Bf16 => "bfloat16".to_owned(),
        _ => dtype.name().to_lowercase(),
    }
}

/// Reads a tolerance, which is neither negative nor infinite.
fn distance(key: &'static str, value: &str) -> Result<f64, CaseError> {
    let distance = number(key, value)?;
    match distance < 0.0 {
        true => Err(CaseError::malformed(key, value, "a number of at least 0")),
        false => Ok(distance),
    }
}

/// A number as text from which the same number is read.
fn shown(number: f64) -> String {
    format!("{number:?}")
}

/// Reads the value that an entry gives to a parameter; `None` for a tensor parameter.
pub(super) fn read_value(parameter: &ParameterInfo, text: &str) -> Result<Option<OwnedValue>, CaseError> {
    let name = parameter.name;
    let malformed = |allowed| CaseError::malformed(name, text, allowed);
    Ok(Some(match parameter.kind {
        Kind::Tensor | Kind::TensorList | Kind::InOut | Kind::Output => return Ok(None),
        Kind::Int if name == LSE_FLAG && (text == "true" || text == "false") => {
            OwnedValue::Int((text == "true").into())
        }
        Kind::Int | Kind::Int8 => OwnedValue::Int(integer(name, text)?),
        Kind::Float => OwnedValue::Float(number(name, text)?),
        Kind::Flag => OwnedValue::Flag(text.parse().map_err(|_| malformed("`true` or `false`"))?),
        Kind::Text | Kind::OptionalText => OwnedValue::Text(Some(text.to_owned())),
        Kind::Ints | Kind::IntList => {
            let list = serde_json::from_str(text);
            OwnedValue::Ints(Some(list.map_err(|_| malformed("a JSON list of integers"))?))
        }
    }))
}

/// Writes the entry that [`read_value`] reads a call's value from; `None` for a tensor, for a null pointer, and for the
/// default of an argument that the operator's first version lacks, since readers may know that version alone.
pub(super) fn value_text<T>(
    arguments: &AnyArguments<T>,
    parameter: &ParameterInfo,
) -> Result<Option<String>, CaseError> {
    let name = parameter.name;
    let Some(value) = arguments.value(name) else {
        return Ok(None);
    };
    let plain = AnyArguments::<()>::new(arguments.operator());
    if parameter.since > 1 && plain.value(name) == Some(value) {
        return Ok(None);
    }
    Ok(match value {
        Value::Int(flag @ 0..=1) if name == LSE_FLAG => Some((flag == 1).to_string()),
        Value::Int(value) => Some(value.to_string()),
        Value::Float(value) => {
            let text = shown(value);
            number(parameter.name, &text)?;
            Some(text)
        }
        Value::Flag(value) => Some(value.to_string()),
        Value::Text(text) => text.map(str::to_owned),
        Value::Ints(values) => values.map(|values| format!("{values:?}")),
    })
}

fn integer(key: &'static str, value: &str) -> Result<i64, CaseError> {
    value.parse().map_err(|_| CaseError::malformed(key, value, "a decimal integer of 64 bits"))
}

fn number(key: &'static str, value: &str) -> Result<f64, CaseError> {
    let parsed: Option<f64> = value.parse().ok();
    parsed
        .filter(|number| number.is_finite())
        .ok_or_else(|| CaseError::malformed(key, value, "a finite decimal number"))
}
