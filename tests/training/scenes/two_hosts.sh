# Trains the long tiny job on one rank in each of two network namespaces, and cuts the link between them.
#   unshare --map-root-user --net bash two_hosts.sh PYTHON JOB PLAN OUT
# Leaves what the launches print in OUT.0 and OUT.1; ends with the first one's exit code, 77 where a namespace
# cannot be had.
python=$1 job=$2 plan=$3 out=$4
unshare --net sleep 300 &
there=$!
trap 'kill -9 $there $second 2> /dev/null' EXIT
for _ in $(seq 100); do
    [ "$(readlink /proc/$there/ns/net)" != "$(readlink /proc/self/ns/net)" ] && break
    sleep 0.1
done
inside="nsenter --net --target $there"
{
    ip link add near type veth peer name far && ip link set far netns $there &&
        ip addr add 10.9.0.1/24 dev near && ip link set lo up && ip link set near up &&
        $inside ip addr add 10.9.0.2/24 dev far && $inside ip link set lo up && $inside ip link set far up
} || exit 77
torchrun="$python -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d"
torchrun="$torchrun --rdzv-endpoint 10.9.0.1:29400 --rdzv-id hosts"
train="-m vivace train $job --plan $plan --out $out --rank-timeout 10s"
GLOO_SOCKET_IFNAME=near $torchrun --local-addr 10.9.0.1 --rdzv-conf is_host=1 $train > "$out.0" 2>&1 &
first=$!
GLOO_SOCKET_IFNAME=far $inside $torchrun --local-addr 10.9.0.2 --rdzv-conf is_host=0 $train > "$out.1" 2>&1 &
second=$!
until grep --quiet --no-messages '"step"' "$out/metrics.jsonl"; do
    kill -0 $first 2> /dev/null && kill -0 $second 2> /dev/null || exit 1
    sleep 0.1
done
ip link set near down
wait $first
code=$?
for _ in $(seq 600); do
    grep --quiet 'cannot reach the launch' "$out.1" && break
    sleep 0.1
done
exit $code
