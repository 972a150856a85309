//! The arguments of RingAttentionUpdate, in its own order.

/// Passes the tokens `$with` and then the table of arguments to the macro `$then`; [`operator`](crate::operator)
/// describes the table's form.
///
/// Source: aclnnRingAttentionUpdate V1 and V2, parameter tables.
#[doc(hidden)]
#[macro_export]
#[rustfmt::skip]
macro_rules! ring_attention_update_arguments {
    ($then:ident $with:tt) => {
        $then! { $with
            1 { prev_attn_out: tensor, PrevAttnOut, "prevAttnOut",
                "Attention over the first keys, `[S, B, H]` or packed `[T, N, D]`." }
            1 { prev_softmax_max: tensor, PrevSoftmaxMax, "prevSoftmaxMax",
                "Its maxima, `[B, N, S, 8]` or `[T, N, 8]`." }
            1 { prev_softmax_sum: tensor, PrevSoftmaxSum, "prevSoftmaxSum", "Its sums, as the maxima." }
            1 { cur_attn_out: tensor, CurAttnOut, "curAttnOut", "Attention over the other keys." }
            1 { cur_softmax_max: tensor, CurSoftmaxMax, "curSoftmaxMax", "Its maxima." }
            1 { cur_softmax_sum: tensor, CurSoftmaxSum, "curSoftmaxSum", "Its sums." }
            1 { actual_seq_qlen: tensor, ActualSeqQlen, "actualSeqQlen",
                "Ends of packed sequences behind a leading 0, in device memory." }
            1 { input_layout: optional_text, InputLayout, "inputLayout", "`SBH` or `TND`." }
            2 { input_softmax_layout: optional_text, InputSoftmaxLayout, "inputSoftmaxLayout",
                "Order of packed softmax tensors: `TND` as they read, otherwise a block `[N, Sq, 8]` for each \
                 sequence." }
            1 { attn_out: output, AttnOut, "attnOut", "Merged attention." }
            1 { softmax_max: output, SoftmaxMax, "softmaxMax", "Merged maxima." }
            1 { softmax_sum: output, SoftmaxSum, "softmaxSum", "Merged sums." }
        }
    };
}

ring_attention_update_arguments! { declare_arguments { "RingAttentionUpdate", #[derive(Copy)] RingUpdateCall<'a> } }
