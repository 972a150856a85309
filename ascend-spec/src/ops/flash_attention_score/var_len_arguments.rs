//! The arguments of FlashAttentionVarLenScore, version by version, in its own order.

/// Passes the arguments of a version of FlashAttentionVarLenScore to a macro, after the tokens that come with them,
/// as [`arguments_of_version!`](crate::arguments_of_version) does: the versions do not extend each other, and their
/// rows are those that FlashAttentionScore declares.
///
/// Source: aclnnFlashAttentionVarLenScore V1 to V5, parameter tables.
#[doc(hidden)]
#[macro_export]
macro_rules! flash_attention_var_len_score_arguments {
    ($version:tt $then:ident $with:tt) => {
        $crate::flash_attention_score_arguments! {
            flash_attention_var_len_score_arguments { @rows $version $then $with }
        }
    };
    (
        { @rows $version:tt $then:ident $with:tt }
        1 $query:tt 1 $key:tt 1 $value:tt
        1 $real_shift:tt 1 $drop_mask:tt 1 $padding_mask:tt 1 $atten_mask:tt
        4 $query_rope:tt 4 $key_rope:tt 4 $d_scale_q:tt 4 $d_scale_k:tt 4 $d_scale_v:tt
        3 $sink:tt 1 $prefix:tt 4 $lengths:tt 4 $lengths_kv:tt 2 $q_start:tt 2 $kv_start:tt
        1 $scale:tt 1 $keep_prob:tt 1 $pre_tokens:tt 1 $next_tokens:tt
        1 $num_heads:tt 1 $input_layout:tt 1 $inner_precise:tt 1 $sparse_mode:tt
        4 $out_dtype:tt 2 $pse_type:tt 4 $order:tt 4 $seed:tt 4 $offset:tt
        1 $softmax_max:tt 1 $softmax_sum:tt 1 $softmax_out:tt 1 $attention_out:tt
    ) => {
        $crate::flash_attention_var_len_score_arguments! {
            @version $version $then $with
            [$query] [$key] [$value] [$query_rope] [$key_rope]
            [$real_shift $drop_mask $padding_mask $atten_mask] [$sink]
            [$prefix $lengths $lengths_kv] [$q_start $kv_start]
            [$scale $keep_prob $pre_tokens $next_tokens $num_heads $input_layout $inner_precise $sparse_mode]
            [$pse_type] [$order]
            [$softmax_max $softmax_sum $softmax_out $attention_out]
        }
    };
    (
        @version 1 $then:ident $with:tt [$query:tt] [$key:tt] [$value:tt] $qr:tt $kr:tt [$($bias:tt)*] $sink:tt
        [$($lengths:tt)*] $start:tt [$($attribute:tt)*] $pse:tt $order:tt [$($out:tt)*]
    ) => {
        $then! { $with $query $key $value $($bias)* $($lengths)* $($attribute)* $($out)* }
    };
    (
        @version 2 $then:ident $with:tt [$query:tt] [$key:tt] [$value:tt] $qr:tt $kr:tt [$($bias:tt)*] $sink:tt
        [$($lengths:tt)*] [$($start:tt)*] [$($attribute:tt)*] [$pse:tt] $order:tt [$($out:tt)*]
    ) => {
        $then! { $with $query $key $value $($bias)* $($lengths)* $($start)* $($attribute)* $pse $($out)* }
    };
    (
        @version 3 $then:ident $with:tt [$query:tt] [$key:tt] [$value:tt] [$qr:tt] [$kr:tt] [$($bias:tt)*] $sink:tt
        [$($lengths:tt)*] [$($start:tt)*] [$($attribute:tt)*] [$pse:tt] $order:tt [$($out:tt)*]
    ) => {
        $then! {
            $with $query $qr $key $kr $value $($bias)* $($lengths)* $($start)* $($attribute)* $pse $($out)*
        }
    };
    (
        @version 4 $then:ident $with:tt [$query:tt] [$key:tt] [$value:tt] $qr:tt $kr:tt [$($bias:tt)*] $sink:tt
        [$($lengths:tt)*] $start:tt [$($attribute:tt)*] $pse:tt [$order:tt] [$($out:tt)*]
    ) => {
        $then! { $with $query $key $value $($bias)* $($lengths)* $($attribute)* $order $($out)* }
    };
    (
        @version 5 $then:ident $with:tt [$query:tt] [$key:tt] [$value:tt] [$qr:tt] [$kr:tt] [$($bias:tt)*] [$sink:tt]
        [$($lengths:tt)*] [$($start:tt)*] [$($attribute:tt)*] [$pse:tt] [$order:tt] [$($out:tt)*]
    ) => {
        $then! {
            $with $query $qr $key $kr $value $($bias)* $sink $($lengths)* $($start)* $($attribute)* $pse $order $($out)*
        }
    };
}

#[cfg(test)]
mod tests {
    macro_rules! names {
        ({} $({ $field:ident: $kind:ident $(= $default:expr)?, $variant:ident, $name:literal, $doc:literal })*) => {
            [$($name),*].as_slice()
        };
    }

    #[test]
    fn each_version_has_its_arguments_in_its_order() {
        let versions = [
            flash_attention_var_len_score_arguments! { 1 names {} },
            flash_attention_var_len_score_arguments! { 2 names {} },
            flash_attention_var_len_score_arguments! { 3 names {} },
            flash_attention_var_len_score_arguments! { 4 names {} },
            flash_attention_var_len_score_arguments! { 5 names {} },
        ];
        assert_eq!(versions.map(<[&str]>::len), [22, 25, 27, 23, 29]);
        let [first, second, third, fourth, fifth] = versions;
        assert_eq!(second[7..12], ["prefix", "actualSeqQLen", "actualSeqKvLen", "qStartIdx", "kvStartIdx"]);
        assert_eq!(second[20], "pseType");
        assert_eq!(third[..5], ["query", "queryRope", "key", "keyRope", "value"]);
        assert_eq!(fourth[18], "softmaxOutLayout");
        assert_eq!(first[17..19], ["sparseMode", "softmaxMax"]);
        assert_eq!(fifth[8..11], ["attenMask", "sink", "prefix"]);
        assert_eq!(fifth[22..26], ["sparseMode", "pseType", "softmaxOutLayout", "softmaxMax"]);
    }
}
