//! A call of another operator than FusedInferAttentionScore on a device, to be written to a file.

use std::borrow::Cow;
use std::sync::Arc;

use ascend_spec::declared::{AnyArgument, AnyArguments};
use ascend_spec::operator::{DeclaredParameter, Value};
use ascend_spec::{CompressedMask, MaskDemand, SparseMode, TensorDesc};

use super::content::{bytes_of, expectation, is_template, packed, text};
use super::live::{refuse_in_captures, settle};
use super::too_large;
use crate::case_file::{CaseTensor, MaskKind, OperatorCase, ParameterCase, Tolerance};
use crate::operator::Tensors;
use crate::runtime::Context;
use crate::tensor::AnyTensor;

/// A call of a declared operator and its tensors.
#[derive(Clone, Debug)]
pub struct LiveOperator {
    context: Arc<Context>,
    /// The version that the call goes to, counted from 1.
    version: u8,
    call: AnyArguments<TensorDesc>,
    /// The tensors, each with its parameter's name and its index in a list; an output may have no memory yet.
    memory: Vec<(&'static str, usize, AnyTensor)>,
}

impl LiveOperator {
    /// A call without its tensors. Without a `version` it goes to the oldest that takes the call.
    pub(crate) fn new(
        context: &Arc<Context>,
        call: &AnyArguments<TensorDesc>,
        version: Option<u8>,
    ) -> Self {
        let oldest = || context.target().map_or(1, |target| call.oldest_on(target));
        Self {
            context: Arc::clone(context),
            version: version.unwrap_or_else(oldest),
            call: call.clone(),
            memory: Vec::new(),
        }
    }

    /// The call with these tensors, and others that stay the same for all launches.
    pub(crate) fn with<'t, P: DeclaredParameter>(
        mut self,
        tensors: &impl Tensors<P>,
        fixed: impl Iterator<Item = (P, &'t AnyTensor)>,
    ) -> Self {
        // Collecting does not fail.
        let _ = tensors.each(|argument, tensor| {
            (self.memory).push((argument.name(), argument.index, tensor.clone()));
            Ok(())
        });
        let fixed = fixed.map(|(parameter, tensor)| (parameter.info().name, 0, tensor.clone()));
        self.memory.extend(fixed);
        self
    }

    fn inputs(&self) -> impl Iterator<Item = (AnyArgument, &TensorDesc)> {
        let all = self.call.each_tensor();
        all.filter(|(at, _)| !at.parameter.kind.is_output())
    }

    /// The outputs that the call writes; a reserved output without elements is none of them.
    fn outputs(&self) -> impl Iterator<Item = (AnyArgument, &TensorDesc)> {
        let all = self.call.each_tensor();
        all.filter(|(at, desc)| at.parameter.kind.is_output() && !desc.is_empty())
    }

    /// The memory of a tensor.
    fn memory(&self, name: &str, index: usize) -> Option<&AnyTensor> {
        let mut memory = self.memory.iter();
        let found = memory.find(|(of, at, _)| (*of, *at) == (name, index));
        found.map(|(_, _, tensor)| tensor)
    }

    fn bytes(&self, name: &str, index: usize, desc: &TensorDesc) -> Result<Vec<u8>, String> {
        let Some(tensor) = self.memory(name, index) else {
            return Err(format!("{name} has no memory"));
        };
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(bytes_of(desc)).map_err(text)?;
        bytes.resize(bytes_of(desc), 0);
        tensor.read_part(0, &mut bytes).map_err(text)?;
        Ok(bytes)
    }

    /// Returns the call without data: its shapes, element types and attributes.
    pub(super) fn parameters(
        &self,
        id: &str,
        accepted: Option<bool>,
        about: &str,
    ) -> ParameterCase {
        let target = self.context.target().ok();
        ParameterCase {
            id: id.to_owned(),
            soc: target.map(|target| target.soc),
            release: target.map(|target| target.cann),
            version: Some(self.version),
            accepted: accepted
                .map(|accepted| (target.map(|target| target.cann), accepted))
                .into_iter()
                .collect(),
            about: about.to_owned(),
            ..ParameterCase::of(self.call.clone())
        }
    }

    /// Returns the case with its data. Refuses more than `room` bytes of them, and a case with another verdict than
    /// the call's.
    pub(super) fn case_within(&self, room: u64) -> Result<OperatorCase, String> {
        let case = self.case(room)?;
        match self.verdict(&case.describe()) == self.verdict(&self.call) {
            true => Ok(case),
            false => Err("a case of it would be judged otherwise".to_owned()),
        }
    }

    /// Returns the case with its data, and with the current outputs as the expected ones.
    pub(super) fn case_with_outputs(&self, tolerance: Tolerance) -> Result<OperatorCase, String> {
        let mut case = self.case(u64::MAX)?;
        packed(self.outputs().map(|(at, desc)| (at.parameter.name, desc)))?;
        for (at, desc) in self.outputs() {
            let name = at.parameter.name;
            let bytes = self.bytes(name, at.index, desc)?;
            let expected = expectation(name, desc, bytes, &mut case.note);
            case.expected
                .extend(expected.map(|expected| (name, expected)));
        }
        case.tolerance = Some(tolerance).filter(|_| !case.expected.is_empty());
        let described = case.describe();
        let differs = |name: &str, desc: &TensorDesc| {
            let implied = described.tensors(name).first();
            implied.is_none_or(|of| (of.dtype, of.shape) != (desc.dtype, desc.shape))
        };
        if self
            .outputs()
            .any(|(at, desc)| differs(at.parameter.name, desc))
        {
            return Err("its outputs are not those that follow from its inputs".to_owned());
        }
        Ok(case)
    }

    fn case(&self, room: u64) -> Result<OperatorCase, String> {
        refuse_in_captures()?;
        packed(self.inputs().map(|(at, desc)| (at.parameter.name, desc)))?;
        let bytes = self.inputs().map(|(_, desc)| bytes_of(desc) as u64);
        let bytes = bytes.fold(0u64, u64::saturating_add);
        if let Some(why) = too_large(bytes, room) {
            return Err(why);
        }
        settle(self.inputs().filter_map(|(at, _)| {
            let name = at.parameter.name;
            Some((name, self.memory(name, at.index)?))
        }))?;
        let target = self.context.target().ok();
        let mut case = OperatorCase {
            arguments: self.call.attributes(),
            op_version: Some(self.version),
            soc_name: target.map(|_| self.context.soc_name().to_owned()),
            cann: target.map(|target| target.cann),
            ..OperatorCase::new(self.call.operator(), "")
        };
        for (at, desc) in self.inputs() {
            let name = at.parameter.name;
            let bytes = self.bytes(name, at.index, desc)?;
            if name == "atten_mask" {
                if self
                    .template()
                    .is_some_and(|of| is_template(of, OperatorCase::mask_form(), desc, &bytes))
                {
                    case.mask = MaskKind::Compressed;
                    continue;
                }
                case.mask = MaskKind::Tensor;
            }
            let tensor = CaseTensor::with_dims(desc.dtype, desc.shape, bytes).map_err(text)?;
            case.arguments.set_tensor(name, tensor).map_err(text)?;
        }
        Ok(case)
    }

    /// The mask that readers make for the call's sparse mode.
    fn template(&self) -> Option<CompressedMask> {
        let Some(Value::Int(mode)) = self.call.value("sparse_mode") else {
            return None;
        };
        match SparseMode::from_acl(mode)?.demand() {
            MaskDemand::Compressed(template) => Some(template),
            _ => None,
        }
    }

    /// Checks `call` against the contract, for this call's version and target. Returns the rule that refuses it, or
    /// the feature that is not supported; `None` if neither.
    fn verdict(&self, call: &AnyArguments<TensorDesc>) -> Option<Cow<'static, str>> {
        let target = self.context.target().ok()?;
        match call.check(self.version, target, &mut |_| {}) {
            Ok(()) => None,
            Err(violation) if violation.is_unsupported() => Some(violation.given.into()),
            Err(violation) => Some(violation.rule.id.into()),
        }
    }
}
