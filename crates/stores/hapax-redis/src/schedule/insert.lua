-- Inserts an entry. One with its key stays as it is.
--
-- KEYS     entries, order, queues, due:QUEUE
-- ARGV[1]  member
-- ARGV[2]  queue
-- ARGV[3]  time until it is due, in microseconds
-- ARGV[4]  sealed note
-- KEYS[5], ARGV[5]  both or neither: name of the store's identity, and the identity without which
--                   nothing is inserted
--
-- Returns S, or R if the identity was replaced, and the member.
local member = ARGV[1]
local found, failed = call('HEXISTS', KEYS[1], member)
if failed then
  return failed
end
if found == 1 then
  return {'S', member}
end
if ARGV[5] then
  local identity = redis.pcall('GET', KEYS[5])
  if type(identity) ~= 'string' or string.sub(identity, 1, 32) ~= ARGV[5] then
    return {'R', member}
  end
end

local value = MAGIC .. string.char(#ARGV[2]) .. ARGV[2] .. ARGV[4]
for _, write in ipairs({
  {'ZADD', KEYS[4], digits(now + ARGV[3]), member},
  {'ZADD', KEYS[2], '0', member},
  {'ZADD', KEYS[3], '0', ARGV[2]},
  {'HSET', KEYS[1], member, value}
}) do
  _, failed = call(unpack(write))
  if failed then
    -- A key has another type, or the permissions are for some commands only.
    redis.pcall('ZREM', KEYS[4], member)
    redis.pcall('ZREM', KEYS[2], member)
    return failed
  end
end
return {'S', member}
