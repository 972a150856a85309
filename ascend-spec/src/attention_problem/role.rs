//! The roles of tensors in attention.

/// The role of a tensor in an [`AttentionProblem`](super::AttentionProblem), whatever the operator calls its argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum TensorRole {
    /// Queries.
    Query,
    /// Keys, by number in their list; 0 if there is one tensor.
    Key(usize),
    /// Values, by number in their list; 0 if there is one tensor.
    Value(usize),
    /// Rotary part of the queries.
    QueryRope,
    /// Rotary part of the keys.
    KeyRope,
    /// Keys of the shared prefix.
    KeyPrefix,
    /// Values of the shared prefix.
    ValuePrefix,
    /// Mask; any byte but 0 hides.
    Mask,
    /// Position bias: a tensor, or one slope for each head.
    Bias,
    /// Attention sink: a logit without a value for each head.
    Sink,
    /// Block table of a paged cache.
    BlockTable,
    /// Left padding of the query.
    QueryPadding,
    /// Left padding of key and value.
    KeyPadding,
    /// Scale of the query.
    QueryScale,
    /// Scale of the keys.
    KeyScale,
    /// Offset of the keys.
    KeyOffset,
    /// Scale of the values.
    ValueScale,
    /// Offset of the values.
    ValueOffset,
    /// Scale of keys and values, one tensor for both.
    KeyValueScale,
    /// Offset of keys and values, one tensor for both.
    KeyValueOffset,
    /// Factor of the scores of an `INT8` query.
    ScoreScale,
    /// Factor of the weights before they are rounded.
    WeightScale,
    /// Factor of the output of an `INT8` query.
    ProductScale,
    /// Scale of a quantised output.
    OutputScale,
    /// Offset of a quantised output.
    OutputOffset,
    /// Output.
    Output,
    /// Log-sum-exp of each row.
    LogSumExp,
    /// Drop mask: one bit for each score.
    DropMask,
    /// Maximum of each row's scores.
    SoftmaxMax,
    /// Sum of each row's exponentials.
    SoftmaxSum,
}
